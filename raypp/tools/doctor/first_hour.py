"""The first hour on new cards (`raypp doctor --first-hour`): ten checks in order, and their page.
Without cards, on CPUs where it can; the rest is skipped with its reason."""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TEMPLATES = Path(__file__).parents[2] / "templates"
_SYNTHETIC = "data={{kind: synthetic, seq_len: {}}}"
_SMALL = ("train.steps=8", "pipeline.microbatches=4", _SYNTHETIC.format(64), "train.precision=fp32", "train.tf32=false")
_LONG = (_SYNTHETIC.format(4096), "train.steps=20")
_FULL_8B = ("train.steps=20", _SYNTHETIC.format(8192), "train.precision=bf16", "train.optimizer.state=fp32",
            "train.micro_batch_size=2", "pipeline.microbatches=1", "pipeline.input_weight=auto")  # fmt: skip
_SEVENTY_B = (*_LONG, "train.precision=bf16_pure", "train.optimizer.state=8bit", "recovery.hang_timeout_s=3600")
_FEW_EXPERTS = (
    "model={kind: qwen3_moe, num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 16, "
    "num_experts: 4, experts_per_token: 2, expert_ffn_size: 64, vocab_size: 320}"
)
_SLOWER, _LARGER = 1.4, 1.05
Words = tuple[str, ...]


class Cards(NamedTuple):
    """What there is to check.

    Attributes:
        nodes: Address and number of cards of each node that has any; without cards, of CPUs.
        kind: What torch calls the cards; "" without.
        device: Their name for `raypp plan --device`; `cuda` if it knows none.
        sources: `tests/gpu` and `benchmarks` are in the current directory.
        profiler: `nsys` is installed here.
        fits: Whether a template with these settings fits the cards by plan.
        peaks: Returns the peaks of memory of a run's ranks, in bytes.
        store: `checkpoint.url` of the runs; "": the templates'.
    """

    nodes: tuple[tuple[str, int], ...]
    kind: str = ""
    device: str = "cuda"
    sources: bool = False
    profiler: bool = False
    fits: Callable[[str, Words], bool] = lambda _template, _settings: True
    peaks: Callable[[str], Sequence[int]] = lambda _run: ()
    store: str = ""


class Step(NamedTuple):
    """One check: what its commands must print, what to do otherwise, and why it is skipped; `check`
    returns what is wrong with what each command printed."""

    title: str
    expects: str
    otherwise: str
    skipped: str
    commands: tuple[Words, ...]
    check: Callable[[Sequence[str]], str] = lambda _printed: ""


class Done(NamedTuple):
    """How a check went; `fault` is "" if nothing was wrong."""

    step: Step
    fault: str
    printed: str
    seconds: float

    @property
    def words(self) -> str:
        """The result in one line."""
        result = "skipped" if self.step.skipped else "FAILED" if self.fault else "passed"
        return ": ".join((result, *(self.step.skipped or self.fault).splitlines()[:1]))


def steps(cards: Cards, prefix: str) -> list[Step]:
    """Returns the checks after the first, `raypp doctor --nccl`; `prefix` begins runs' names."""
    gpus, each = bool(cards.kind), min((count for _, count in cards.nodes), default=0)
    pair, memory, struck = (f"{prefix}-{name}" for name in ("pair", "memory", "struck"))
    world, units = each * len(cards.nodes), "cards" if gpus else "CPUs"

    def submit(name: str, template: str, settings: Words) -> Words:
        own = (f"name={name}", f"resources.device={'cuda' if gpus else 'cpu'}")
        store = (f"checkpoint.url={cards.store}",) if cards.store else ()
        return ("raypp", "submit", _path(template), "--json", *_set((*own, *store, *settings)))

    def planned(template: str, settings: Words, *words: str) -> Words:
        return ("raypp", "plan", _path(template), "--json", "--device", cards.device, *words, *_set(settings))

    def timed(name: str, template: str, settings: Words) -> tuple[Words, ...]:
        plan = (planned(template, settings, "--links", "links.json"),) if gpus and cards.device != "cuda" else ()
        return (submit(f"{prefix}-{name}", template, settings), *plan)

    def fitting(template: str, settings: Words, small: Words, other: str = "quickstart") -> tuple[str, Words]:
        return (template, settings) if gpus and cards.fits(template, settings) else (other, (*_SMALL, *small))

    a_card = "" if gpus else "needs a card; there is none"
    two = "" if world > 1 else f"needs two {units}; there is {world or 'none'}"
    beside = "" if each > 1 else f"needs two {units} in every node"
    nodes = "" if len(cards.nodes) > 1 else "needs two nodes; there is one"
    sources = a_card or ("" if cards.sources else "needs raypp's sources: type it in a clone of the repository")
    profiler = a_card or beside or ("" if cards.profiler else "needs NVIDIA's profiler: nsys is not installed here")

    two_ranks = (*_SMALL, "mesh={pp: 2}")
    one = fitting("lora-8b", (*_LONG, f"mesh={{pp: {min(2, max(1, world))}}}"), ("mesh={pp: 1}",))
    shards = fitting("full-8b", (*_FULL_8B, f"mesh={{fsdp: {each}}}"), ("mesh={fsdp: 2}",))
    across = fitting("seventy-b", (*_SEVENTY_B, f"mesh={{pp: {world}}}"), ("mesh={pp: 2}",))
    spread = f"mesh={{pp: {len(cards.nodes)}, fsdp: {each}, ep: {each}}}"
    experts = fitting("experts", (*_LONG, spread), (_FEW_EXPERTS, "mesh={fsdp: 2, ep: 2}"), "experts")
    faults = "kill@forward:rank=1,step=4" + ("; freeze@forward:rank=0,step=6,attempt=2" if gpus else "")
    debug, near = (("resources.env={NCCL_DEBUG: INFO}",), 1e-4) if gpus else ((), 0.0)
    torchrun = "nsys profile --stats=true -t cuda,nvtx python -m torch.distributed.run --nproc-per-node=2 -m raypp.rank"
    profiled = (*torchrun.split(), _path(one[0]), *_set((*one[1], "train.steps=3", "mesh={pp: 2}")))
    return [
        Step("Kernels on one card", "all tests pass", "send the failed tests with their output", sources,
             (("python", "-m", "pytest", "tests/gpu", "-n", "3", "--dist", "loadfile", "-q"),)),
        Step("Two ranks on two devices",
             "SUCCEEDED without a restart; the loss of step 1 is that of `raypp parity` (cards: within 1e-4); "
             "NCCL's log has one communicator of 2 ranks for each pair and direction",
             "read `raypp events` of the run; try NCCL_P2P_DISABLE=1 in resources.env", two,
             (submit(pair, "quickstart", (*two_ranks, *debug)), ("raypp", "history", pair),
              ("raypp", "parity", _path("quickstart"), "--json", "--steps", "1", *_set(two_ranks)),
              *((("raypp", "logs", pair),) if gpus else ())),
             lambda printed: _ended(printed[0]) or _differ(printed[1], printed[2], near)),
        Step("Speed of one card",
             "8B with full recomputation: at least 6,500 tokens/s on an H100; attention `cudnn` or `flash3`",
             "look at `nvidia-smi -q -d PERFORMANCE,CLOCK` for a limit of power or heat; install `raypp[gpu]`", sources,
             (("python", "-m", "benchmarks.gpu_single"),)),
        Step("Memory beside its plan", "no rank's peak (`raypp report`) is more than 5 % above the plan's `total`",
             "send the page: the plan counts less than this card needs", a_card,
             (submit(memory, *one), planned(*one, "--exact")),
             lambda printed: _ended(printed[0]) or _exceeds(cards.peaks(memory), printed[1])),
        Step("Shards inside one node",
             "SUCCEEDED without a restart; at most 1.4 times the plan's step (8B on eight H100: 2.2 to 2.6 s)",
             "`raypp timeline` of the run: gathers and sums must run beside compute", beside,
             timed("shards", *shards), _too_slow),
        Step("Processors held by waiting receives",
             "the mean times of GEMM and attention kernels are at most 2 % above those of check 4",
             "above 5 %, send the table: receives hold too many thread blocks", profiler, (profiled,)),
        Step("A pipeline over all nodes",
             "first step within 10 minutes; at most 1.4 times the plan's step (70B on 16 H100: 480 tokens/s each)",
             "`raypp plan --links links.json` names the slowest link, `raypp doctor` an HCA that is down", nodes,
             timed("nodes", *across), _too_slow),
        Step("Failures", "the run restarts and succeeds; every loss is that of check 3, bit for bit",
             "send `raypp events --json` of the run", two,
             (submit(struck, "quickstart", (*two_ranks, f'resources.env={{RAYPP_FAULTS: "{faults}"}}')),
              ("raypp", "history", struck), ("raypp", "history", pair)),
             lambda printed: _ended(printed[0], faults.count("@")) or _differ(printed[1], printed[2])),
        Step("Experts", "SUCCEEDED without a restart (30B-A3B on 16 H100: at least 1,500 tokens/s each)",
             "send `raypp timeline`; if all is well, let check 8's job run for 24 h: memory must not grow", beside,
             timed("experts", *experts), lambda printed: _ended(printed[0])),
    ]  # fmt: skip


def page(done: Sequence[Done], cards: Cards, versions: str, when: str) -> str:
    """Returns the page to send, in Markdown."""
    where = ", ".join(f"{node} ({count})" for node, count in cards.nodes) or "none"
    kind = cards.kind or "CPUs only: nothing here says how fast a card is"
    lines = ["# First hour on new cards", "", f"{when} · {versions}", "", f"Devices: {kind}. Nodes: {where}.", ""]
    lines += ["| | check | result | s |", "|---|---|---|---|"]
    for number, one in enumerate(done, 1):
        words = one.words.replace("|", "\\|")
        lines.append(f"| {number} | {one.step.title} | {words} | {one.seconds:.0f} |")
    for number, one in enumerate(done, 1):
        lines += ["", f"## {number}. {one.step.title}", "", one.words, "", "````"]
        lines += [shlex.join(command) for command in one.step.commands]
        lines += ["````", "", f"Must print: {one.step.expects}.", "", f"If not: {one.step.otherwise}."]
        lines += ["", "````", one.printed.rstrip(), "````"] if one.printed else []
    return "\n".join(lines) + "\n"


def _path(template: str) -> str:
    return str(TEMPLATES / f"{template}.yaml")


def _set(settings: Sequence[str]) -> Words:
    return tuple(word for one in settings for word in ("--set", one))


def _objects(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def _ended(printed: str, restarts: int = 0) -> str:
    end = _objects(printed)[-1]
    if end["state"] != "SUCCEEDED":
        return f"the run ended as {end['state']}"
    return "" if end["restarts"] == restarts else f"{end['restarts']} restarts, where {restarts} were expected"


def _too_slow(printed: Sequence[str]) -> str:
    if (fault := _ended(printed[0])) or len(printed) == 1:
        return fault
    reached = _objects(printed[0])[-1]["tokens_per_s"]
    expected = json.loads(printed[1])["predictions"][0]["tokens_per_s"]
    return "" if reached * _SLOWER >= expected else f"{reached:,.0f} tokens/s, where the plan expects {expected:,.0f}"


def _differ(history: str, expected: str, tolerance: float = 0.0) -> str:
    """Compares the losses of a run with those of another, or with those of `raypp parity`."""
    rows = _objects(expected)
    rows = rows[-1]["steps"] if rows and "steps" in rows[-1] else rows
    losses = {row["step"]: row["loss"] for row in _objects(history)}
    for step, loss in ((row["step"], row["loss"]) for row in rows):
        loss = loss[1] if isinstance(loss, list) else loss
        if step not in losses or not abs(losses[step] - loss) <= tolerance * abs(loss):
            return f"the loss of step {step} is {losses.get(step)}, not {loss}"
    return ""


def _exceeds(peaks: Sequence[int], plan: str) -> str:
    limit = max(one["total"] for one in json.loads(plan)["played"])
    return "" if max(peaks, default=0) <= _LARGER * limit else f"a rank used {max(peaks):,} bytes; planned: {limit:,}"
