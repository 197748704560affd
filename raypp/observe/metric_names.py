"""The metrics of a run, as Ray exports them (with `ray_` before the name): one place for names and help."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One gauge, set by the run's controller.

    Attributes:
        name: As given to `ray.util.metrics.Gauge`; Prometheus sees `ray_` + name.
        help: One line for people, with the unit.
        tags: Label names every sample carries.
    """

    name: str
    help: str
    tags: tuple[str, ...] = ("run",)


STEP = Metric("raypp_step", "Last finished optimizer step.")
STEPS = Metric("raypp_steps", "Optimizer steps the run is to make.")
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
ATTEMPT = Metric("raypp_attempt", "Number of the present attempt, from 1.")
RESTARTS = Metric("raypp_restarts", "Restarts since the run was submitted.")
CHECKPOINT_STEP = Metric("raypp_checkpoint_step", "Step of the newest committed checkpoint; 0 when there is none.")
RANKS_ALIVE = Metric("raypp_ranks_alive", "Ranks of the present attempt whose process lives.")
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
