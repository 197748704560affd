"""The job file: what each section holds. The text under a field is what `raypp explain` prints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raypp.spec.families import ModelSection
from raypp.spec.models import DecoderOptions, Section

RUN_NAME = r"^[a-z0-9][a-z0-9-]{0,39}$"


class EvalOptions(Section):
    """The held-out part: a fraction of the data, or a path of its own."""

    fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the documents kept out of training."""
    path: str | None = None
    """Held-out data of the same kind."""


class DataSection(Section):
    """Where the tokens come from."""

    kind: str = "text"
    """Or your own as module.path:function."""
    path: str | None = None
    """File, directory, glob, or the URL of objects in a store, such as s3://bucket/prefix. Relative paths start where
    `raypp` is run, then beside the job file."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json."""
    seq_len: int = Field(default=256, ge=2)
    """Longest sequence in tokens; also the length of every microbatch when lengths are not negotiated."""
    packing: bool = True
    """Put several documents into one row; they never attend across each other."""
    shuffle: bool = True
    """Visit the documents in an order drawn from train.seed, a new one each epoch."""
    text_key: str = "text"
    """jsonl and hf: the field that holds the text."""
    num_documents: int = Field(default=1000, ge=1)
    """synthetic: how many documents."""
    document_len: tuple[Annotated[int, Field(ge=2)], Annotated[int, Field(ge=2)]] = (16, 256)
    """synthetic: shortest and longest document, in tokens."""
    eval: EvalOptions | None = None
    """Optional held-out part: {fraction: 0.02} or {path: …}."""


class MeshSection(Section):
    """How many ranks along each axis; world = pp · dp_replicate · fsdp · cp."""

    pp: int = Field(default=1, ge=1)
    """Pipeline parallel: ranks a model is cut over."""
    dp_replicate: int = Field(default=1, ge=1)
    """Data-parallel replicas that each hold all weights of their stage."""
    fsdp: int = Field(default=1, ge=1)
    """Data-parallel ranks that share the weights of their stage (FSDP2)."""
    cp: int = Field(default=1, ge=1)
    """Context parallel: ranks a sequence is cut over."""
    ep: int = Field(default=1, ge=1)
    """Expert parallel: folded into fsdp · cp, must divide it."""
    cp_style: Literal["ring", "ulysses"] = "ring"
    """How attention crosses the cut of a sequence."""
    reshard_after_forward: bool = False
    """Free unsharded weights between microbatches: less memory, one all-gather per microbatch and layer."""

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.fsdp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks along the data: each reads its own rows."""
        return self.dp_replicate * self.fsdp


Compression = Literal["none", "bf16", "int8"]


class DirectionsSection(Section):
    """What is done to each of the two things that travel."""

    activations: Compression = "none"
    """What forwards send: none | bf16 | int8."""
    gradients: Compression = "none"
    """What backwards send: none | bf16 | int8."""


class WireOptions(Section):
    """How activations and gradients travel between stages."""

    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of what is not compressed. auto: as computed. bf16 rounds what is computed in fp32."""
    compression: Compression | DirectionsSection = "none"
    """none keeps every bit; bf16 and int8 (stochastic rounding) do not. Or {activations: int8, gradients: bf16}."""

    @property
    def compresses(self) -> bool:
        """Whether any message may be smaller than what was computed."""
        return self.dtype == "bf16" or any(self.of(what) != "none" for what in ("activations", "gradients"))

    def of(self, what: Literal["activations", "gradients"]) -> Compression:
        """The compression of one of the two."""
        if isinstance(self.compression, DirectionsSection):
            return self.compression.activations if what == "activations" else self.compression.gradients
        return self.compression


class PipelineSection(Section):
    """The schedule and the cut."""

    schedule: str = "1f1b"
    """Or your own: module.path:function, or a .csv file of actions."""
    microbatches: int = Field(default=8, ge=1)
    """Microbatches per replica and step."""
    stages_per_rank: int = Field(default=1, ge=1)
    """Virtual stages on each rank (interleaved and V schedules)."""
    lookahead: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Extra warm-up forwards that hide link time; 0 = classic. auto: measured in the first steps, then chosen."""
    variable_seq_len: Literal["microbatch", "step", "off"] = "microbatch"
    """microbatch: each its own negotiated length | step: one for the whole step | off: data.seq_len."""
    pad_to_multiple_of: int = Field(default=8, ge=1)
    """Lengths are rounded up to a multiple of this (per cp rank)."""
    seq_len_bucket: int = Field(default=0, ge=0)
    """Round the negotiated length up to a multiple of this; 0 = off."""
    layers_per_stage: list[Annotated[int, Field(ge=0)]] | None = None
    """An explicit cut, one number per stage, e.g. [3, 5]."""
    input_weight: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
    """What the embedding costs, in layers; auto = from FLOPs and bytes."""
    output_weight: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
    """What the last norm, the output projection and the loss cost, in layers; auto = from FLOPs and bytes."""
    wire: WireOptions = Field(default_factory=WireOptions)
    """How activations and gradients travel between stages."""


class OptimizerOptions(Section):
    """The optimizer; its state is kept in fp32."""

    kind: str = "adamw"
    """Or your own as module.path:function."""
    lr: float = Field(default=3.0e-4, ge=0)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """adamw: decay of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """adamw: added to the denominator."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, on matrices only."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """sgd and muon: momentum."""


class LrSchedule(Section):
    """The learning rate over the steps."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: int = Field(default=10, ge=0)
    """Steps of linear warm-up from 0."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """The last learning rate as a share of the peak."""


class TrainSection(Section):
    """How long, how much, how."""

    steps: int = Field(default=50, ge=1)
    """Optimizer steps of the whole run."""
    micro_batch_size: int = Field(default=2, ge=1)
    """Rows per microbatch."""
    seed: int = Field(default=0, ge=0)
    """Seed of initialisation and data order; the mesh does not enter."""
    optimizer: OptimizerOptions = Field(default_factory=OptimizerOptions)
    """The optimizer."""
    lr_schedule: LrSchedule = Field(default_factory=LrSchedule)
    """The learning rate over the steps."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; null: no clipping."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: weights and gradients in fp32, compute in bf16, reductions in fp32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """What gradients are summed in over data-parallel ranks; bf16 halves what travels and needs precision bf16."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward to save memory."""
    compile: bool = False
    """torch.compile each block."""
    eval_every_steps: int = Field(default=0, ge=0)
    """Evaluate on the held-out part every so many steps, and at the end; 0 = never."""


class CheckpointSection(Section):
    """Where the state goes, and how often."""

    url: str = "~/.raypp/checkpoints"
    """A directory, or the URL of a store such as s3://bucket/prefix; the run lives below url/name."""
    every_steps: int = Field(default=10, ge=0)
    """Save every so many steps, and at the end; 0 = only at the end."""
    keep: int = Field(default=3, ge=1)
    """Committed checkpoints kept; older ones are deleted after a commit."""
    keep_every: int = Field(default=0, ge=0)
    """Steps that are multiples of this are kept for ever; 0 = none."""
    if_busy: Literal["wait", "skip"] = "wait"
    """When a periodic save is due before the last one is durable. wait: training waits for it | skip: this save is left
    out. The last save, one before a stop and one an operator asks for are never left out."""
    max_upload_mbps: float = Field(default=0, ge=0)
    """Most that the saves of one node, and its copies of snapshots to another, send together, in Mbit/s, shared equally
    by its ranks; 0 = saves without limit, copies in a quarter of the link."""
    memory_tier: bool = True
    """Keep the newest snapshots in host memory (/dev/shm), with a copy on another node where there is one: after a
    failure the run goes on from there. A rank takes 2 × its state on one node, 6 × on several; when memory is short the
    run does without, and says so."""
    memory_every_steps: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Steps between two snapshots in memory. auto: 1 while one costs less than 2 % of a step's time, else more."""


class ElasticOptions(Section):
    """How small a run may become without nodes that were lost, and how soon."""

    min_ranks: int = Field(default=1, ge=1)
    """Fewer ranks than these are not worth it: the run fails instead."""
    max_ranks: int | None = Field(default=None, ge=1)
    """More ranks than these are never used; null: those of the mesh."""
    grace_s: float = Field(default=30, ge=0)
    """A lost node may come back for so long before the run goes on without it."""


class RecoverySection(Section):
    """What to do when something breaks."""

    policy: str = "default"
    """Who decides whether the run goes on after a failure: default | your own as module.path:factory"""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts in a row without a new committed step before the run fails."""
    hang_timeout_s: float = Field(default=60, gt=0)
    """Longest a step may stand still; 10 × the median step when that is more, minutes in an attempt's first step."""
    on_nonfinite: Literal["skip", "stop", "restart"] = "skip"
    """When loss or gradients of a step are NaN or infinite. skip: no update in that step (three in a row end the run) |
    stop: the run fails | restart: from the newest commit or snapshot; the same at the same step again ends the run."""
    spike_factor: float | None = Field(default=None, gt=1)
    """Tell, by an event, of a loss above so many times the median of the last steps; null: off."""
    check_replicas: bool = True
    """Before each save, compare checksums of weights that several ranks hold (dp_replicate, tied embeddings)."""
    straggler_factor: float = Field(default=2.0, ge=0)
    """Tell, by an event, of a rank that keeps computing so many times as long as its peers; 0: off."""
    elastic: bool | ElasticOptions = False
    """Go on with fewer nodes, the global batch and the order of the data unchanged, and grow again when nodes return:
    true, or {min_ranks, max_ranks, grace_s}."""
    standby: bool = True
    """Keep one idle process with everything imported on each node, to take a killed rank's place (about 0.4 GB)."""
    orphan_timeout_s: float = Field(default=600, gt=0)
    """Ranks train on without the run's controller for so long, then save and end by themselves."""

    @property
    def elastic_options(self) -> ElasticOptions | None:
        """What `elastic` allows; None when it is off."""
        if isinstance(self.elastic, ElasticOptions):
            return self.elastic
        return ElasticOptions() if self.elastic else None


class ResourcesSection(Section):
    """What each rank gets."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where every rank can have one, else cpu; it is said which."""
    cpus_per_rank: float = Field(default=1, gt=0)
    """CPUs reserved for each rank."""
    spares: int = Field(default=0, ge=0)
    """Ranks' worth of devices held ready, on other nodes where there is room; they take a lost node's place. They are
    asked for after the first step, and never waited for."""
    env: dict[str, str] = Field(default_factory=dict)
    """Extra environment for workers, e.g. GLOO_SOCKET_IFNAME."""


class Job(Section):
    """One training job: the whole file."""

    name: str = Field(pattern=RUN_NAME)
    """The run's name: a-z, 0-9 and -, at most 40."""
    model: ModelSection = Field(default_factory=DecoderOptions)
    """What is trained."""
    data: DataSection = Field(default_factory=DataSection)
    """Where the tokens come from."""
    mesh: MeshSection = Field(default_factory=MeshSection)
    """How many ranks along each axis."""
    pipeline: PipelineSection = Field(default_factory=PipelineSection)
    """The schedule and the cut."""
    train: TrainSection = Field(default_factory=TrainSection)
    """How long, how much, how."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """Where the state goes, and how often."""
    recovery: RecoverySection = Field(default_factory=RecoverySection)
    """What to do when something breaks."""
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    """What each rank gets."""

    @property
    def num_stages(self) -> int:
        return self.mesh.pp * self.pipeline.stages_per_rank

    @property
    def run_url(self) -> str:
        """Where the run lives: url/name."""
        return f"{self.checkpoint.url.rstrip('/')}/{self.name}"
