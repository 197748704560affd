"""What a run measures: the quantities of a step and where each is shown, and the gauges.

History, trackers, charts and gauges read this table: a new quantity is an entry here, and a
field or an extra of `StepReport`, which `rank.step.step` fills. Ray exports gauges with the prefix
`ray_`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One gauge, set by the run's controller. `name`: name given to `ray.util.metrics.Gauge`;
    Prometheus sees `ray_` + name. `help`: one line of description, with the unit. `tags`: names of
    the labels that every sample carries."""

    name: str
    help: str
    tags: tuple[str, ...] = ("run",)


STEP = Metric("raypp_step", "Last finished optimizer step.")
STEPS = Metric("raypp_steps", "Optimizer steps that the run makes in all.")
LOSS = Metric("raypp_loss", "Loss of the last step, per valid token, over all replicas.")
GRAD_NORM = Metric("raypp_grad_norm", "Global gradient norm of the last step, before clipping.")
LEARNING_RATE = Metric("raypp_learning_rate", "Learning rate of the last step.")
AUX_LOSS = Metric("raypp_aux_loss", "Load-balancing loss of the last step, unweighted, mean over layers; experts only.")
Z_LOSS = Metric("raypp_z_loss", "Router z-loss of the last step, unweighted, mean over layers; experts only.")
LOSS_SCALE = Metric("raypp_loss_scale", "Loss scale of the last step; fp16 only.")
OVERFLOWS = Metric("raypp_overflows", "Steps of the run that overflowed and made no update; fp16 only.")
WIRE_BYTES = Metric("raypp_wire_bytes", "Bytes between stages in the last step; compressed, or with replicas only.")
REPLICA_BYTES = Metric("raypp_replica_bytes", "Bytes sent to other replicas for the last step; with replicas only.")
TOKENS_PER_SECOND = Metric("raypp_tokens_per_second", "Valid tokens per second in the last step, over all replicas.")
TOKENS = Metric("raypp_tokens", "Valid tokens of the last step, over all replicas.")
SEQ_LEN = Metric("raypp_seq_len", "Longest agreed sequence length of the last step, in tokens.")
STEP_SECONDS = Metric("raypp_step_seconds", "Wall time of the last step, in seconds.")
STEP_PART_SECONDS = Metric(
    "raypp_step_part_seconds", "Wall time of one part of the last step, in seconds.", ("run", "part")
)
TFLOPS = Metric("raypp_tflops", "TFLOP/s of the model in the last step, per GPU; recomputation not counted.")
MFU = Metric("raypp_mfu", "The same as a share of the GPU's peak, 0 to 1.")
ATTEMPT = Metric("raypp_attempt", "Number of the current attempt, from 1.")
RESTARTS = Metric("raypp_restarts", "Restarts since the run was submitted.")
CHECKPOINT_STEP = Metric("raypp_checkpoint_step", "Step of the newest committed checkpoint; 0 if there is none.")
RANKS_ALIVE = Metric("raypp_ranks_alive", "Ranks of the current attempt whose process is alive.")
STATE = Metric("raypp_state", "1 for the state the run is in, 0 for the others.", ("run", "state"))

METRICS = tuple(one for one in tuple(vars().values()) if isinstance(one, Metric))


@dataclass(frozen=True)
class Quantity:
    """A number of a step.

    Attributes:
        name: Its field in `StepReport` (or key in `extras`), and its name in history and trackers.
        gauge: Set after each step; None without one.
        title: Of its curve in reports; "" without one. What has a curve goes to trackers, too.
        unit: Of the curve.
        column: Its place in a line of `raypp history`, from 1; 0 if it is not in it.
    """

    name: str
    gauge: Metric | None
    title: str = ""
    unit: str = ""
    column: int = 0


QUANTITIES = (
    Quantity("loss", LOSS, "Loss", "per token", column=2),
    Quantity("grad_norm", GRAD_NORM, "Gradient norm", "before clipping", column=3),
    Quantity("lr", LEARNING_RATE, "Learning rate"),
    Quantity("tokens_per_s", TOKENS_PER_SECOND, "Throughput", "tokens/s", column=7),
    Quantity("step_s", STEP_SECONDS, "Step time", "s", column=6),
    Quantity("seq_len", SEQ_LEN, "Longest row", "tokens", column=5),
    Quantity("step", STEP, column=1),
    Quantity("tokens", TOKENS, column=4),
    Quantity("attempt", None, column=8),
)
"""Of every step; curves in their order in reports."""
EXTRAS = (
    Quantity("wire_bytes", WIRE_BYTES, "Messages between stages", "bytes"),
    Quantity("replica_bytes", REPLICA_BYTES, "Sent to other replicas", "bytes"),
    Quantity("tflops", TFLOPS, "Model FLOPs", "TFLOP/s per GPU"),
    Quantity("mfu", MFU, "MFU", "share of the GPU's peak"),
    Quantity("aux_loss", AUX_LOSS, "Balance loss", "aux_loss, unweighted"),
    Quantity("z_loss", Z_LOSS, "Router z-loss", "z_loss, unweighted"),
    Quantity("loss_scale", LOSS_SCALE, "Loss scale"),
    Quantity("overflows", OVERFLOWS, "Overflows", "steps without an update"),
)
"""Of replicas, GPUs, models that have them, and fp16. Other extras are shown by their name."""
CURVES = tuple(one for one in QUANTITIES if one.title)
ROW_KEYS = tuple(one.name for one in sorted(QUANTITIES, key=lambda one: one.column) if one.column)
"""Keys of every line of `raypp history`, in order; `StepReport.values` follow."""
