"""The sections of the job file. The docstring of a field is its help in `raypp explain`."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from raypp.job import limits
from raypp.job.known_families import ModelSection
from raypp.job.models import DecoderOptions, LoraOptions
from raypp.job.precision import Precision, PrecisionName, precision_of
from raypp.job.section import Section
from raypp.records import AXES, Coordinates

RUN_NAME = r"^[a-z0-9][a-z0-9-]{0,39}$"


Column = Literal[
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "segments",
    "text", "system", "tools", "role", "content",
]  # fmt: skip
Role = Literal["system", "developer", "user", "assistant", "tool"]


class EvalOptions(Section):
    """The held-out part: either a fraction of the training data, or a separate path."""

    fraction: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the documents held out of training."""
    path: str | None = None
    """Path of held-out data, of the same kind as the training data."""


class SourceOptions(Section):
    """Where documents come from."""

    kind: str = "text"
    """A built-in kind, or your own as module.path:function."""
    path: str | None = None
    """File, directory, glob, or URL of objects in a store such as s3://bucket/prefix. A relative
    path is looked up in the current directory first, then next to the job file. hf: also org/name
    on the hub."""
    text_key: str = "text"
    """jsonl and hf: name of the field that holds the text."""
    columns: dict[Column, str] = Field(default_factory=dict)
    """chat and hf: what the data call a column, or a key of turns, such as {messages: dialog, role:
    speaker}. Columns named here decide what a row is."""
    roles: dict[Role, str | list[str]] = Field(default_factory=dict)
    """chat and hf: more names of a role, such as {assistant: [bot, ai]}."""
    split: str = "train"
    """hf: the split to read, if the data have splits."""
    config: str | None = None
    """hf: the configuration (folder) to read, if the data have several."""
    num_documents: int = Field(default=1000, ge=1, le=limits.COUNT)
    """synthetic: number of documents."""
    document_len: tuple[Annotated[int, Field(ge=2, le=limits.WIDTH)], Annotated[int, Field(ge=2, le=limits.WIDTH)]] = (
        16,
        256,
    )
    """synthetic: lengths of the shortest and the longest document, in tokens."""


class PartOptions(SourceOptions):
    """A part of a mixture: a source, its weight and how much of it may be used."""

    name: str | None = Field(default=None, pattern=RUN_NAME)
    """Its name in the history. null: from its path."""
    weight: float = Field(default=1.0, gt=0, le=limits.WIDTH)
    """Its share of the rows, relative to the other parts."""
    epochs: float | None = Field(default=None, gt=0, le=limits.COUNT)
    """Use it for at most this many epochs; then the other parts share its rows. null: no limit."""
    tokens: int | None = Field(default=None, ge=1, le=limits.SEED)
    """Use at most about this many tokens of it (to the end of a row). null: no limit."""


class PhaseOptions(Section):
    """A mixture's weights from a step on."""

    from_step: int = Field(ge=2, le=limits.COUNT)
    """The first step with these weights."""
    weights: dict[str, Annotated[float, Field(ge=0, le=limits.WIDTH)]] = Field(min_length=1)
    """Weights by the name of a part; 0: no more rows of it. Other parts keep theirs."""


class AddedToken(Section):
    """A token that the tokenizer lacks. "<|tool|>" alone is {text: <|tool|>}. With model.from_hf,
    embedding and head get a row for each that is new: the mean of the others."""

    text: str = Field(min_length=1, max_length=limits.PROMPT)
    """The text that it stands for."""
    special: bool = True
    """Leave it out of generated texts."""


def _token(given: Any) -> Any:
    return {"text": given} if isinstance(given, str) else given


_Added = Annotated[AddedToken, BeforeValidator(_token, json_schema_input_type=str | AddedToken)]


class DataSection(SourceOptions):
    """Where the tokens come from."""

    parts: list[PartOptions] | None = None
    """mixture: its parts, such as [{weight: 2, kind: text, path: a.txt}, {weight: 1, …}]."""
    phases: list[PhaseOptions] = Field(default_factory=list, max_length=limits.PHASES)
    """mixture: other weights from a step on, such as [{from_step: 901, weights: {code: 3}}]."""
    tokenizer: str = "bytes"
    """bytes (one token per byte), or the path of a tokenizer.json or of its folder. Without the
    key, a job with model.from_hf takes the model's own."""
    add_bos: Literal["auto"] | bool = "auto"
    """What a text begins with, unless it is a conversation. auto: what the tokenizer puts around
    it, as in transformers | true: also its beginning token | false: nothing."""
    added_tokens: list[_Added] = Field(default_factory=list)
    """Tokens to add to the tokenizer, such as ["<|tool|>", {text: <call>, special: false}]."""
    seq_len: int = Field(default=256, ge=2, le=limits.WIDTH)
    """Longest sequence, in tokens. With variable_seq_len: off, the length of all microbatches."""
    packing: bool = True
    """Pack several documents into one row. Documents never attend to each other."""
    chat_template: Annotated[str | None, BeforeValidator(lambda given: None if given == "auto" else given)] = None
    """chat and hf: file with the Jinja template of conversations. null or auto: the tokenizer's,
    chat_template.jinja or tokenizer_config.json beside it."""
    template_date: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """chat and hf: the date, such as '2026-01-31', for templates that ask for today's."""
    loss: Literal["assistant", "last", "all"] = "assistant"
    """chat and hf: which tokens carry loss. assistant: what the assistant writes, and completions |
    last: its last turn only | all: every token."""
    max_document: int | None = Field(default=None, ge=2, le=limits.WIDTH)
    """Longest document, in tokens, where it is not seq_len: shorter with packing, of rows that hold
    several; longer with too_long: drop, which then drops only longer ones and cuts the others."""
    too_long: Literal["cut", "drop"] = "cut"
    """Documents longer than max_document. cut: into several pieces | drop: left out. The run
    reports how many."""
    shuffle: bool = True
    """Shuffle the documents with train.seed, in a new order each epoch."""
    eval: EvalOptions | None = None
    """Optional held-out part: {fraction: 0.02} or {path: …}."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document that is not too long."""
        return self.seq_len if self.max_document is None else self.max_document

    @property
    def piece(self) -> int:
        """Tokens of a document's pieces at most."""
        return min(self.longest, self.seq_len)

    def part(self, number: int) -> DataSection:
        """Returns the section as it would be if a part were the only source."""
        assert self.parts is not None
        chosen = {name: getattr(self.parts[number], name) for name in SourceOptions.model_fields}
        return self.model_copy(update={**chosen, "parts": None, "phases": []})

    def sources(self) -> list[tuple[str, DataSection]]:
        """Returns the key and the section of each source of training rows: the parts of a mixture,
        else the section itself."""
        if not self.parts:
            return [("data", self)]
        return [(f"data.parts[{index}]", self.part(index)) for index in range(len(self.parts))]

    def all_sources(self) -> list[tuple[str, DataSection]]:
        """Returns `sources`, and without parts that of data.eval, if it has a path."""
        if self.parts or self.eval is None or self.eval.path is None:
            return self.sources()
        return [*self.sources(), ("data.eval", self.model_copy(update={"path": self.eval.path}))]

    def weights_at(self, step: int) -> list[float]:
        """Returns the weight of every part of a mixture in a step (1-based)."""
        weights = {index: part.weight for index, part in enumerate(self.parts or ())}
        places = {part.name: index for index, part in enumerate(self.parts or ())}
        for phase in self.phases:
            if phase.from_step <= step:
                weights |= {places[name]: weight for name, weight in phase.weights.items()}
        return list(weights.values())


class MeshSection(Section):
    """Number of ranks along each axis. World size = pp · dp_replicate · fsdp · cp · tp."""

    pp: int = Field(default=1, ge=1, le=limits.RANKS)
    """Pipeline parallel: ranks that the layers are split over."""
    dp_replicate: int = Field(default=1, ge=1, le=limits.RANKS)
    """Data parallel: replicas that each hold all weights of their stage."""
    fsdp: int = Field(default=1, ge=1, le=limits.RANKS)
    """Data parallel: ranks that shard the weights of their stage (FSDP2)."""
    cp: int = Field(default=1, ge=1, le=limits.RANKS)
    """Context parallel: ranks that each sequence is split over."""
    tp: int = Field(default=1, ge=1, le=limits.RANKS)
    """Tensor parallel: ranks of one node that compute each layer together. Each holds a part of its
    matrices, and between blocks a part of the tokens of each row."""
    ep: int = Field(default=1, ge=1, le=limits.RANKS)
    """Expert parallel: ranks that the experts are split over. Uses the ranks of fsdp · cp and must
    divide them."""
    cp_style: Literal["ring", "ulysses"] = "ring"
    """How attention runs across the ranks of cp. ring: keys and values go round | ulysses:
    all-to-all over heads."""
    reshard_after_forward: bool = False
    """Free unsharded weights between microbatches. Saves memory, costs one all-gather per layer and
    microbatch."""
    reduce_gradients: Literal["auto", "each_microbatch", "last_microbatch"] = "auto"
    """When the ranks of fsdp · cp sum their gradients. last_microbatch: once a step; until then
    each holds those of all weights of its stage | each_microbatch: in every backward; between them
    each holds its share | auto: each_microbatch on GPUs inside a fast node (at least 100 GB/s), or
    where ranks would not fit otherwise; else last_microbatch. `raypp plan` says which and why."""

    @property
    def world(self) -> int:
        return self.sizes.world

    @property
    def sizes(self) -> Coordinates:
        """The length of each axis."""
        return Coordinates(*(getattr(self, axis.name) for axis in AXES))

    @property
    def axes(self) -> dict[str, int]:
        """The length of each axis by name, and ep."""
        return {**self.sizes.as_dict(), "ep": self.ep}

    @property
    def shards(self) -> int:
        """Number of ranks that weights are sharded over: fsdp · cp."""
        return self.sizes.shards

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks that read different rows."""
        return self.sizes.replicas


Compression = Literal["none", "bf16", "int8"]


class DirectionsSection(Section):
    """Compression per direction."""

    activations: Compression = "none"
    """Compression of the activations that forwards send: none | bf16 | int8."""
    gradients: Compression = "none"
    """Compression of the gradients that backwards send: none | bf16 | int8."""


class WireOptions(Section):
    """How activations and gradients travel between stages."""

    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of messages that are not compressed. auto: the dtype of the computation | bf16: rounds
    fp32 values."""
    compression: Compression | DirectionsSection = "none"
    """none is lossless. bf16 and int8 (stochastic rounding) lose precision. Per direction:
    {activations: int8, gradients: bf16}."""

    @property
    def compresses(self) -> bool:
        """Whether any message may be smaller than the computed tensor."""
        return self.dtype == "bf16" or any(self.of(what) != "none" for what in ("activations", "gradients"))

    def of(self, what: Literal["activations", "gradients"]) -> Compression:
        """Returns the compression of activations or of gradients."""
        if isinstance(self.compression, DirectionsSection):
            return self.compression.activations if what == "activations" else self.compression.gradients
        return self.compression


class PipelineSection(Section):
    """The pipeline schedule and how layers are split into stages."""

    schedule: str = "1f1b"
    """A built-in schedule, or your own: module.path:function, or a .csv file of actions."""
    microbatches: int = Field(default=8, ge=1, le=limits.ACTIONS)
    """Microbatches per replica and step."""
    stages_per_rank: int = Field(default=1, ge=1, le=limits.STAGES)
    """Stages on each rank. Interleaved and V schedules use more than one."""
    lookahead: Literal["auto"] | Annotated[int, Field(ge=0, le=limits.ACTIONS)] = "auto"
    """How far ranks run ahead so that messages are hidden: 1f1b has that many more warm-up forwards
    for each later rank. 0: the classic schedule | auto: measured in the first steps, then
    chosen."""
    variable_seq_len: Literal["microbatch", "step", "off"] = "microbatch"
    """How ranks agree on sequence lengths. microbatch: one length per microbatch | step: one length
    per step | off: data.seq_len."""
    pad_to_multiple_of: int = Field(default=8, ge=1, le=limits.WIDTH)
    """Pad lengths to a multiple of this many tokens (per cp rank)."""
    seq_len_bucket: int = Field(default=0, ge=0, le=limits.WIDTH)
    """Round the agreed length up to a multiple of this many tokens. 0: off."""
    layers_per_stage: list[Annotated[int, Field(ge=0, le=limits.LAYERS)]] | None = None
    """Layers of each stage, one number per stage, e.g. [3, 5]. null: balanced automatically."""
    input_weight: Literal["auto"] | Annotated[float, Field(ge=0, le=limits.WIDTH)] = "auto"
    """Cost of the embedding, in layers. auto: computed from FLOPs and bytes."""
    output_weight: Literal["auto"] | Annotated[float, Field(ge=0, le=limits.WIDTH)] = "auto"
    """Cost of the final norm, the output projection and the loss, in layers. auto: computed from
    FLOPs and bytes."""
    wire: WireOptions = Field(default_factory=WireOptions)
    """How activations and gradients travel between stages."""


class ParameterGroup(Section):
    """Parameters with a rate or a decay of their own."""

    match: str = Field(min_length=1, max_length=limits.EXPRESSION)
    """Regular expression that is searched for in global names, such as embed|lm_head."""
    lr_factor: float = Field(default=1.0, ge=0, le=limits.REAL)
    """Their learning rate as a multiple of the others'."""
    weight_decay: float | None = Field(default=None, ge=0, le=limits.REAL)
    """Weight decay of the matrices among them. null: the optimizer's."""


class OptimizerOptions(Section):
    """The optimizer and its state."""

    kind: str = "adamw"
    """A built-in optimizer, or your own as module.path:function."""
    state: Literal["fp32", "8bit"] = "fp32"
    """Dtype of the state. 8bit (adamw only): both moments block-wise quantised, 2 bytes per
    parameter instead of 8."""
    lr: float = Field(default=3.0e-4, ge=0, le=limits.REAL)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """adamw: decay rates of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0, le=limits.REAL)
    """adamw: added to the denominator."""
    weight_decay: float = Field(default=0.1, ge=0, le=limits.REAL)
    """Decoupled weight decay, applied to matrices only."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """sgd and muon: momentum."""
    groups: list[ParameterGroup] = Field(default_factory=list, max_length=limits.GROUPS)
    """Parameters with a rate or a decay of their own, such as [{match: embed|lm_head, lr_factor:
    0.1, weight_decay: 0}]. No parameter may be in two; `raypp plan` lists them."""
    offload: bool = False
    """Keep the optimizer's state in host memory and, with precision: bf16, the fp32 weights too.
    The update copies them to the device and back block by block, and takes that much longer. The
    numbers do not change. On a CPU it saves nothing."""


class LrSchedule(Section):
    """The learning rate over the steps."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up. wsd: the peak, then a linear fall in the last decay_steps."""
    warmup_steps: int | None = Field(default=None, ge=0, le=limits.COUNT)
    """Steps of linear warm-up from 0. null: 10, or by warmup_ratio."""
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    """The same as a share of train.steps, rounded up."""
    decay_steps: int | None = Field(default=None, ge=1, le=limits.COUNT)
    """Steps of the fall. cosine and linear: it begins after the warm-up, and min_ratio stays after
    it; null: until the last step | wsd: it ends with the last step; null: a tenth of train.steps.
    """
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""


class SampleOptions(Section):
    """Texts that the model continues during training; they go into the run's events."""

    prompts: tuple[Annotated[str, Field(min_length=1, max_length=limits.PROMPT)], ...] = Field(
        min_length=1, max_length=limits.PROMPTS
    )
    """Beginnings of texts."""
    every_steps: int = Field(default=100, ge=1, le=limits.COUNT)
    """Steps between samples. Also samples at the end."""
    max_new_tokens: int = Field(default=32, ge=1, le=limits.NEW_TOKENS)
    """New tokens of each text, fewer where the model ends it."""


class SyncOptions(Section):
    """How the replicas of mesh.dp_replicate stay one model."""

    kind: Literal["exact", "int8", "outer"] = "exact"
    """exact: sums of the gradients as computed | int8: each replica sends its gradients in int8, a
    quarter of the bytes with two replicas; the rounding error is added in the next step (error
    feedback) and is part of checkpoints. Needs gradients that are summed in fp32 | outer: replicas
    train apart, each with its own optimizer state and clipping, and every every_steps steps the
    mean of their weights moves the common ones (DiLoCo, docs/design/0061)."""
    every_steps: Literal["auto"] | Annotated[int, Field(ge=1, le=limits.OUTER_STEPS)] = 50
    """outer: steps between two outer steps, which also follow the last step. Checkpoints,
    evaluations and samples are taken at outer steps only. auto: as few, from 10 on, as make steps 5
    % longer at most on the link between replicas; submission prints the choice, a resume keeps
    it."""
    link_gbps: float | None = Field(default=None, gt=0, le=limits.REAL)
    """outer: rate of the link that the ranks of a replica share to reach the others, in Gbit/s per
    direction, for every_steps: auto and plans. null: `raypp plan`'s --links or --link-gbps."""
    lr: float = Field(default=0.7, gt=0, le=limits.REAL)
    """outer: learning rate of the outer step."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """outer: Nesterov momentum of the outer step. 0.0 with lr: 1.0 takes the replicas' mean, which
    lost least with two replicas in our runs (docs/tasks/two_sites.md)."""
    compression: Literal["none", "int8", "int4"] = "none"
    """outer: none: replicas send their weights | int8, int4: what these changed by, in so many
    bits, with error feedback; a quarter or an eighth of the bytes with two replicas."""

    fragments: int = Field(default=1, ge=1, le=limits.LAYERS)
    """outer: parts of the model, of whole layers, that take turns within every_steps steps, so that
    the link is evenly used."""

    overlap_steps: int = Field(default=0, ge=0, le=limits.COUNT)
    """outer: an outer step takes what replicas sent so many steps before, while they trained on:
    the link has that long. Fewer than every_steps / fragments."""

    @property
    def differs(self) -> bool:
        """Whether a replica's weights differ from those agreed on when state is saved."""
        return self.fragments > 1 or self.overlap_steps > 0

    @property
    def every(self) -> int:
        """Steps between two outer steps. Of auto, before `Job.with_every_steps`: the default."""
        return 50 if self.every_steps == "auto" else self.every_steps

    def fragment_due(self, step: int) -> int | None:
        """The fragment whose outer step follows a step; None: it is no fragment's turn."""
        turn, rest = divmod(step % self.every, self.every // self.fragments)
        return None if rest else turn

    @property
    def bits(self) -> int:
        """Bits of a number that a replica sends in an outer step; 0: its weights, not rounded."""
        return {"none": 0, "int8": 8, "int4": 4}[self.compression]


class BatchOptions(Section):
    """The size of a step in tokens."""

    tokens: int = Field(ge=1, le=limits.COUNT)
    """Tokens of a step of all replicas, with every row full."""


class LossScaleOptions(Section):
    """How train.precision fp16 scales the loss: overflows halve the scale, good steps double it."""

    init: float = Field(default=65536, ge=1, le=2**24)
    """The first scale of the mean loss of a full microbatch: a power of two."""
    growth_interval: Annotated[int, Field(ge=1, le=limits.COUNT)] | None = 2000
    """Steps without overflow after which the scale doubles. null: it stays init, and a step that
    overflows is one that is not finite (recovery.on_nonfinite)."""


class Fp8Options(Section):
    """What train.precision fp8 computes in fp8."""

    bf16_layers: int = Field(default=1, ge=0, le=limits.COUNT)
    """Layers at either end of the model whose products are in bf16, as those of its ends are."""
    experts: bool = False
    """Compute products of experts in fp8, too. Only compute capability 9.0 (H100, H200) has them;
    CPUs compute the same numbers."""


class TrainSection(Section):
    """Length of the run, batch size, optimizer and precision."""

    steps: int = Field(default=50, ge=1, le=limits.COUNT)
    """Optimizer steps of the whole run."""
    epochs: float | None = Field(default=None, gt=0, le=limits.EPOCHS)
    """In place of steps: how often the run takes its rows. Submission counts them, as they are
    packed, and prints the steps; the last one is filled from the next epoch."""
    micro_batch_size: int = Field(default=2, ge=1, le=limits.ROWS)
    """Rows per microbatch."""
    global_batch: Annotated[int, Field(ge=1, le=limits.COUNT)] | BatchOptions | None = None
    """Rows of a step of all replicas, or {tokens: 524288}, in full rows of data.seq_len.
    pipeline.microbatches follows from it for any mesh. null: it follows from
    pipeline.microbatches."""
    seed: int = Field(default=0, ge=0, le=limits.SEED)
    """Seed of the initialisation and the data order. Neither depends on the mesh."""
    optimizer: OptimizerOptions = Field(default_factory=OptimizerOptions)
    """The optimizer."""
    lr_schedule: LrSchedule = Field(default_factory=LrSchedule)
    """The learning rate over the steps."""
    clip_norm: float | None = Field(default=1.0, gt=0, le=limits.REAL)
    """Clip gradients to this global norm. null: no clipping."""
    precision: Literal["auto", PrecisionName] = "auto"
    """auto: bf16 on CUDA that has it, fp16 on older cards with fast products in it, else fp32;
    submission prints the choice, a resume keeps it | bf16: weights and gradients in fp32, compute
    in bf16, reductions in fp32 | bf16_pure: weights in bf16 only, updated by stochastic rounding;
    gradients are summed in reduce_dtype | fp16: like bf16, with loss_scale | fp8: like bf16, but
    products with the matrices of layers have factors in fp8 (e4m3, a scale per row), and only the
    gradients of these matrices are products in bf16. fp32 on CUDA: see tf32."""
    loss_scale: LossScaleOptions = Field(default_factory=LossScaleOptions)
    """The scale of the loss with precision: fp16."""
    fp8: Fp8Options = Field(default_factory=Fp8Options)
    """What precision: fp8 computes in fp8."""
    tf32: bool = True
    """On CUDA with precision: fp32, matrix products round their factors to TF32 (10 bits) and add
    in fp32. false: products in fp32, several times slower. No effect on CPUs or in half precision.
    """
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are reduced over data-parallel ranks, and with precision: bf16_pure
    summed over microbatches. bf16 halves the traffic and needs precision bf16, bf16_pure or fp8."""
    sync: SyncOptions = Field(default_factory=SyncOptions)
    """How replicas stay one model: {kind: exact}, {kind: int8}, {kind: outer, every_steps: 50}."""
    activation_checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    """Recompute activations in the backward to save memory. selective: all but the results of
    matrix products and attention | full: everything but the inputs of layers | offload: like full,
    and the inputs of layers wait for their backward in host memory. On a CPU, offload saves nothing
    over full."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile. auto: on CUDA with a C compiler, unless the run
    samples, the model is your own, or the schedule splits backwards in fp8; the run reports
    it."""
    attention: Literal["auto", "flash3", "flash4", "cudnn", "varlen", "flex", "plain"] = "auto"
    """Attention kernel. auto: the first that suits the device, the dtype and the head width, in the
    order given; the run reports it | flash3, flash4: FlashAttention 3 and 4 | cudnn: cuDNN |
    varlen: torch's variable-length kernel | flex: FlexAttention | plain: torch's
    scaled_dot_product_attention, document by document, the only one on CPUs."""
    eval_every_steps: int = Field(default=0, ge=0, le=limits.COUNT)
    """Steps between evaluations on the held-out part. Also evaluates at the end. 0: never."""
    sample: SampleOptions | None = None
    """Optional samples: {prompts: ["In the beginning"], every_steps: 100, max_new_tokens: 32}."""

    @property
    def dtypes(self) -> Precision:
        """The dtypes of weights, products and sums. Of auto, before `for_device`: those of fp32."""
        return precision_of("fp32" if self.precision == "auto" else self.precision, self.reduce_dtype)

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled. Of auto, before `planning.decide`: no."""
        return self.compile is True

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        schedule = self.lr_schedule
        if schedule.warmup_ratio is not None:
            return math.ceil(Fraction(repr(schedule.warmup_ratio)) * self.steps)
        return 10 if schedule.warmup_steps is None else schedule.warmup_steps

    @property
    def decay(self) -> tuple[int, int]:
        """The step after which the learning rate falls, and the steps that it takes."""
        length = self.lr_schedule.decay_steps
        if self.lr_schedule.kind == "wsd":
            length = -(-self.steps // 10) if length is None else length
            return self.steps - length, length
        return self.warmup_steps, self.steps - self.warmup_steps if length is None else length

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step (1-based). Linear warm-up, then the schedule's shape
        down to `min_ratio`. It depends on the step alone, so a checkpoint need not save it."""
        schedule, peak = self.lr_schedule, self.optimizer.lr
        if step <= self.warmup_steps:
            return peak * step / self.warmup_steps
        if schedule.kind == "constant":
            return peak
        first, length = self.decay
        progress = min(1.0, max(0, step - first) / max(1, length))
        fall = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1 - progress
        return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * fall)


class BestOptions(Section):
    """Checkpoints that are kept because they are good."""

    keep: int = Field(default=1, ge=1, le=limits.COUNT)
    """Number of them. They count beside the newest, and may be among these."""
    by: Literal["eval_loss"] = "eval_loss"
    """eval_loss: the loss on the held-out part at that step."""


class CheckpointSection(Section):
    """Where checkpoints are stored, how often they are saved, and how many are kept."""

    url: str = "~/.raypp/checkpoints"
    """A directory, or the URL of a store such as s3://bucket/prefix. The run's files are below
    url/name. Without the key, the directory is in RAYPP_HOME, if that is set."""
    every_steps: int = Field(default=10, ge=0, le=limits.COUNT)
    """Steps between saves. Also saves at the end. 0: only at the end."""
    keep: int = Field(default=3, ge=1, le=limits.COUNT)
    """Number of committed checkpoints to keep. Older ones are deleted after a commit, so the store
    needs room for one more."""
    best: BestOptions | None = None
    """Also keep those with the least loss on the held-out part, such as {keep: 2, by: eval_loss}.
    Needs train.eval_every_steps. null: none."""
    keep_every: int = Field(default=0, ge=0, le=limits.COUNT)
    """Keep checkpoints whose step is a multiple of this forever. 0: none."""
    if_busy: Literal["wait", "skip"] = "wait"
    """What to do when a periodic save is due while the previous one is still uploading. wait:
    training waits for it | skip: skip this save. Final saves, saves before a stop and saves that an
    operator requests are never skipped."""
    max_upload_mbps: float = Field(default=0, ge=0, le=limits.RATE)
    """Upload limit per node in Mbit/s, shared equally by its ranks. Covers saves and the copies of
    snapshots to another node, which also wait while training messages are under way, so that a save
    may take up to four times as long. 0: no limit for saves, a quarter of the link for copies."""
    memory_tier: bool = True
    """Keep the newest snapshots in host memory (/dev/shm), with a copy on another node if there is
    one. After a failure the run resumes from them. Takes 3 × the rank's state on one node, 6 × on
    several. When memory is short, the run logs it and trains without snapshots."""
    memory_every_steps: Literal["auto"] | Annotated[int, Field(ge=1, le=limits.COUNT)] = "auto"
    """Steps between snapshots in memory. auto: 1 while a snapshot costs less than 2 % of the step
    time, else more."""


class ElasticOptions(Section):
    """How few ranks a run may continue with after it lost nodes, and how long it waits for them."""

    min_ranks: int = Field(default=1, ge=1, le=limits.RANKS)
    """Fail the run rather than continue with fewer ranks."""
    max_ranks: int | None = Field(default=None, ge=1, le=limits.RANKS)
    """Never use more ranks than this. null: the size of the mesh."""
    grace_s: float = Field(default=30, ge=0, le=limits.SECONDS)
    """Seconds to wait for a lost node before the run continues without it."""


class RecoverySection(Section):
    """What to do after a failure."""

    policy: str = "default"
    """The policy that decides whether the run continues after a failure: default | your own as
    module.path:factory"""
    max_restarts: int = Field(default=3, ge=0, le=limits.COUNT)
    """Restarts in a row without a new committed step before the run fails."""
    hang_timeout_s: float = Field(default=60, gt=0, le=limits.SECONDS)
    """Seconds without progress after which a step counts as hung. At least 10 × the median step
    time, and several minutes in the first step of an attempt."""
    on_nonfinite: Literal["skip", "stop", "restart"] = "skip"
    """What to do when the loss or gradients of a step are NaN or infinite. skip: skip the update
    (three in a row fail the run) | stop: fail the run | restart: restart from the newest commit or
    snapshot (the same failure at the same step fails the run)."""
    on_spike: Literal["continue", "skip", "stop"] = "continue"
    """What to do when a loss exceeds spike_factor times the median, in place of the event alone.
    continue: only the event | skip: leave out the step's update (three in a row fail the run) |
    stop: fail the run before the update."""
    spike_factor: float | None = Field(default=None, gt=1, le=limits.REAL)
    """Report an event when the loss exceeds this multiple of the median of the last steps. null:
    off."""
    check_replicas: bool = True
    """Before each save, compare checksums of weights that several ranks hold (dp_replicate, tied
    embeddings)."""
    straggler_factor: float = Field(default=2.0, ge=0, le=limits.REAL)
    """Report an event when a rank's compute time stays above this multiple of its peers. 0: off."""
    elastic: bool | ElasticOptions = False
    """Continue with fewer nodes when some are lost, and grow again when nodes return. The global
    batch and the data order do not change. true, or {min_ranks, max_ranks, grace_s}."""
    preemptible: bool = False
    """Give all devices to a run of higher priority that waits for them: save, wait in line, and go
    on in turn. An elastic run gives what it can spare without that."""
    site_timeout_s: float | None = Field(default=None, ge=0, le=limits.SECONDS)
    """With train.sync: {kind: outer}: seconds to wait for a lost site before the run continues with
    the replicas that are left, of the same shape. A site that returns takes part again from an
    outer step on. The global batch and the data order do not change. null: wait for it."""
    standby: bool = True
    """Keep one idle worker with everything imported (about 0.4 GB) on each node of the run, and on
    at most two others with room for ranks. It takes the place of a killed rank."""
    orphan_timeout_s: float = Field(default=600, gt=0, le=limits.SECONDS)
    """Seconds that ranks keep training without the run's controller before they save and exit."""

    @property
    def elastic_options(self) -> ElasticOptions | None:
        """The options of `elastic`, or what `site_timeout_s` stands for; None if both are off."""
        if self.site_timeout_s is not None:
            return ElasticOptions(grace_s=self.site_timeout_s)
        if isinstance(self.elastic, ElasticOptions):
            return self.elastic
        return ElasticOptions() if self.elastic else None


class ResourcesSection(Section):
    """Devices, CPUs and environment of each rank."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if every rank can have a GPU, else cpu. `raypp submit` prints the choice."""
    cpus_per_rank: float = Field(default=1, ge=0.001, le=limits.RANKS)
    """CPUs reserved for each rank."""
    spares: int = Field(default=0, ge=0, le=limits.RANKS)
    """Number of spare devices (one per rank) to reserve, on other nodes if possible. They replace a
    lost node. The run requests them after its first step and never waits for them."""
    env: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables for workers, e.g. GLOO_SOCKET_IFNAME. Stored jobs show the values
    of NCCL_*, TORCH_* and the like, and digests of all others."""
    shown_env: list[str] = Field(default_factory=list)
    """Names of more variables in `env` whose values stored jobs may show."""


class TrackerOptions(Section):
    """A tracker that also gets the run's figures, and its options."""

    kind: str
    """A built-in tracker, or your own as module.path:function."""
    options: dict[str, str] = Field(default_factory=dict)
    """Its options, for example {mode: offline}; `raypp explain observe.trackers` lists them."""


def _tracker(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


Tracker = Annotated[TrackerOptions, BeforeValidator(_tracker, json_schema_input_type=str | TrackerOptions)]


class EndOptions(Section):
    """What is told of a run's end, on the head of its cluster."""

    url: str | None = Field(default=None, pattern=r"^(https?://|\$)")
    """Gets the JSON in a POST. $NAME is that variable of resources.env: jobs are stored in
    clear."""
    command: str | None = None
    """Gets the JSON on its standard input, such as "python3 /home/me/tell.py". Split into words as
    a shell does, but run without one, for a minute at most."""


class ObserveSection(Section):
    """Where the run's figures go, beside its own records."""

    trackers: list[Tracker] = Field(default_factory=list, max_length=limits.TRACKERS)
    """Each a kind or {kind: …, options: {…}}, such as [tensorboard, {kind: wandb, options: {mode:
    offline}}]. A tracker that fails never stops the run."""
    on_end: EndOptions | None = None
    """What is told when the run succeeds, fails or is stopped, as JSON: run, state, step, reason,
    exit_code, checkpoint, report (the command that makes it). If that fails, an event says so."""


class Job(Section):
    """A training job: the whole file."""

    name: str = Field(pattern=RUN_NAME)
    """Name of the run: 1 to 40 of a-z, 0-9 and -."""
    include: str | None = None
    """Another job file, relative to this one, such as base.yaml: what stands here replaces its
    values, section by section. A list is replaced as a whole. One file includes none further."""
    model: ModelSection = Field(default_factory=DecoderOptions)
    """The model to train."""
    data: DataSection = Field(default_factory=DataSection)
    """Where the tokens come from."""
    mesh: MeshSection = Field(default_factory=MeshSection)
    """Number of ranks along each axis."""
    pipeline: PipelineSection = Field(default_factory=PipelineSection)
    """The pipeline schedule and how layers are split into stages."""
    train: TrainSection = Field(default_factory=TrainSection)
    """Length of the run, batch size, optimizer and precision."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """Where checkpoints are stored, how often they are saved, and how many are kept."""
    recovery: RecoverySection = Field(default_factory=RecoverySection)
    """What to do after a failure."""
    resources: ResourcesSection = Field(default_factory=ResourcesSection)
    """Devices, CPUs and environment of each rank."""
    observe: ObserveSection = Field(default_factory=ObserveSection)
    """Where the run's figures go, beside its own records."""

    @model_validator(mode="after")
    def _decide_microbatches(self) -> Self:
        """Decides `pipeline.microbatches` by `train.global_batch`; `check_spec` reports why not."""
        rows, each = self.batch_rows, self.mesh.replicas * self.train.micro_batch_size
        if rows is not None and rows % each == 0 and "microbatches" not in self.pipeline.model_fields_set:
            microbatches = min(int(rows) // each, limits.ACTIONS)
            self.__dict__["pipeline"] = self.pipeline.model_copy(update={"microbatches": microbatches})
        return self

    @property
    def batch_rows(self) -> float | None:
        """The rows that `train.global_batch` asks for, maybe not whole; None: it is not given."""
        batch = self.train.global_batch
        return batch.tokens / self.data.seq_len if isinstance(batch, BatchOptions) else batch

    @model_validator(mode="after")
    def _decide_base(self) -> Self:
        """Decides `model.lora.base: auto`, so that a run's job says what its adapters belong to."""
        lora = self.model.lora
        if lora is not None and lora.base == "auto" and self.train.precision != "auto":
            self.__dict__["model"] = self._model_with_base(lora)
        return self

    def for_device(self, device: str, *, cuda: str = "bf16") -> Self:
        """Returns the job with what `auto` of train.precision and train.compile means on a device.
        On cuda, train.compile stays auto: it depends on the nodes (`planning.decide`). `device`:
        cpu or cuda. `cuda`: what train.precision is on the cards (`precision.auto_on`)."""
        job = self.with_precision(cuda if device == "cuda" else "fp32")
        if device == "cuda" or job.train.compile != "auto":
            return job
        return job.model_copy(update={"train": job.train.model_copy(update={"compile": False})})

    def with_precision(self, name: str) -> Self:
        """Returns the job with a precision in place of auto; itself where it is not auto."""
        if self.train.precision != "auto":
            return self
        job = self.model_copy(update={"train": self.train.model_copy(update={"precision": name})})
        lora = self.model.lora
        return job.model_copy(update={"model": job._model_with_base(lora)}) if lora and lora.base == "auto" else job

    def _model_with_base(self, lora: LoraOptions) -> ModelSection:
        return self.model.model_copy(update={"lora": lora.model_copy(update={"base": self.train.dtypes.compute.name})})

    @property
    def num_stages(self) -> int:
        return self.mesh.pp * self.pipeline.stages_per_rank

    @property
    def rows_per_step(self) -> int:
        """Rows of a step, of all replicas."""
        return self.mesh.replicas * self.pipeline.microbatches * self.train.micro_batch_size

    @property
    def outer(self) -> SyncOptions | None:
        """How replicas that train apart agree again; None if they sum gradients. One that is left
        of several takes outer steps alone."""
        return self.train.sync if self.train.sync.kind == "outer" else None

    @property
    def at_outer_steps(self) -> dict[str, int]:
        """The steps between two events that are at outer steps only, by their key; 0: never."""
        steps = {"checkpoint.every_steps": self.checkpoint.every_steps}
        steps["train.eval_every_steps"] = self.train.eval_every_steps
        if self.train.sample is not None:
            steps["train.sample.every_steps"] = self.train.sample.every_steps
        return steps

    def outer_intervals(self) -> list[int]:
        """Returns what train.sync.every_steps may be, up to 500: more are not known to train."""
        sync, most = self.train.sync, min(500, self.train.steps)
        least = sync.fragments * (sync.overlap_steps + 1)
        fitting = range(least, most + 1, sync.fragments)
        return [n for n in fitting if not any(steps % n for steps in self.at_outer_steps.values())]

    def with_every_steps(self, steps: int) -> Self:
        """Returns the job with train.sync.every_steps in place of auto; itself without it."""
        return self if self.train.sync.every_steps != "auto" else self.with_sync(every_steps=steps)

    def with_sync(self, **changes: int) -> Self:
        """Returns the job with other values in train.sync."""
        sync = self.train.sync.model_copy(update=changes)
        return self.model_copy(update={"train": self.train.model_copy(update={"sync": sync})})

    def period(self, step: int) -> int:
        """Returns the last outer step of any fragment up to a step, which must be the same for
        replicas' states to belong together; 0 where they do not train apart."""
        if self.outer is None:
            return 0
        if step == self.train.steps:
            return step
        return step - step % (self.outer.every // self.outer.fragments)

    @property
    def summed_replicas(self) -> int:
        """Replicas over which each step sums gradients: one where they train apart."""
        return 1 if self.outer is not None else self.mesh.dp_replicate

    @property
    def reduces_each(self) -> bool:
        """Whether every backward sums gradients over the ranks that share weights."""
        return self.mesh.reduce_gradients == "each_microbatch" and self.mesh.shards > 1

    def with_reduction(self, name: str) -> Self:
        """Returns the job with mesh.reduce_gradients in place of auto; itself without auto."""
        if self.mesh.reduce_gradients != "auto":
            return self
        return self.model_copy(update={"mesh": self.mesh.model_copy(update={"reduce_gradients": name})})

    @property
    def fsdp_alone(self) -> bool:
        """Whether FSDP makes the copies in the compute dtype also on a rank that shares no weights:
        it can make them from weights in host memory, and free those of a block after its use. With
        mesh.tp it takes part everywhere."""
        beside = self.train.optimizer.offload or self.mesh.reshard_after_forward
        return self.mesh.tp > 1 or (self.train.dtypes.copies_weights and beside)

    def savable(self, step: int) -> bool:
        """Whether the state after a step can be saved: always, or at multiples of
        train.sync.every_steps where replicas train apart."""
        return self.outer is None or step % self.outer.every == 0 or step == self.train.steps

    def all_meet(self, step: int) -> bool:
        """Whether all ranks agree after a step: always, or before and after outer steps."""
        return self.savable(step) or self.savable(step + 1)

    @property
    def run_url(self) -> str:
        """URL of the run's files: url/name."""
        return f"{self.checkpoint.url.rstrip('/')}/{self.name}"
