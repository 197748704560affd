"""Names and help texts of a run's metrics. Ray exports them with the prefix `ray_`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One gauge, set by the run's controller.

    Attributes:
        name: Name given to `ray.util.metrics.Gauge`; Prometheus sees `ray_` + name.
        help: One line of description, with the unit.
        tags: Names of the labels that every sample carries.
    """

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
TOKENS_PER_SECOND = Metric("raypp_tokens_per_second", "Valid tokens per second in the last step, over all replicas.")
TOKENS = Metric("raypp_tokens", "Valid tokens of the last step, over all replicas.")
SEQ_LEN = Metric("raypp_seq_len", "Longest agreed sequence length of the last step, in tokens.")
STEP_SECONDS = Metric("raypp_step_seconds", "Wall time of the last step, in seconds.")
STEP_PART_SECONDS = Metric(
    "raypp_step_part_seconds", "Wall time of one part of the last step, in seconds.", ("run", "part")
)
ATTEMPT = Metric("raypp_attempt", "Number of the current attempt, from 1.")
RESTARTS = Metric("raypp_restarts", "Restarts since the run was submitted.")
CHECKPOINT_STEP = Metric("raypp_checkpoint_step", "Step of the newest committed checkpoint; 0 if there is none.")
RANKS_ALIVE = Metric("raypp_ranks_alive", "Ranks of the current attempt whose process is alive.")
STATE = Metric("raypp_state", "1 for the state the run is in, 0 for the others.", ("run", "state"))

METRICS: tuple[Metric, ...] = (
    STEP,
    STEPS,
    LOSS,
    GRAD_NORM,
    LEARNING_RATE,
    AUX_LOSS,
    Z_LOSS,
    TOKENS_PER_SECOND,
    TOKENS,
    SEQ_LEN,
    STEP_SECONDS,
    STEP_PART_SECONDS,
    ATTEMPT,
    RESTARTS,
    CHECKPOINT_STEP,
    RANKS_ALIVE,
    STATE,
)
