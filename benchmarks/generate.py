"""Tokens per second of decoding, compared with transformers.

Both load the same small Llama with random weights, in fp32 on the CPU, with one thread, and decode
greedily in turns in one process. Prompts of a batch have different lengths; transformers pads them
at their beginning. The tokens are compared, too.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.surroundings import begin
from benchmarks.tables import head, spread
from raypp.planning.resolve import resolve_pipeline
from raypp.stages.pipeline.decode import Choice, PipelineDecoder, Prompt
from raypp.tools.inference.rank import load_stages
from raypp.tools.inference.source import find_source

SIZES = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
}  # fmt: skip
CASES = ((1, 32), (8, 32), (8, 256))
"""Prompts of a batch, and tokens of the longest of them."""


def main() -> None:
    version = f"transformers {transformers.__version__}"
    options = begin(__doc__, version, new=(64, "new tokens per prompt"), rounds=(3, "turns of both in each case"))
    torch.set_num_threads(1)
    print(head("prompts | longest | raypp tokens/s | transformers tokens/s | ratio (range) | same tokens"))
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model("llama", **SIZES)
        theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
        theirs.save_pretrained(folder)
        ours = _decoder(Path(folder))
        for rows, longest in CASES:
            _case(ours, theirs, rows, longest, options.new, options.rounds)


def _decoder(folder: Path) -> Any:
    source = find_source(str(folder))
    job = source.job()
    stages = load_stages(source, job, resolve_pipeline(job), 0, torch.device("cpu"))
    return PipelineDecoder(stages, [0], 0, int(source.model["hidden_size"]), torch.float32, torch.device("cpu"))


def _case(ours: Any, theirs: Any, rows: int, longest: int, new: int, rounds: int) -> None:
    """Prints the row of a case."""
    generator = torch.Generator().manual_seed(1)
    lengths = [max(1, longest - 3 * row) for row in range(rows)]
    prompts = [torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in lengths]
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def by_raypp() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        wanted = [Prompt(tuple(prompt), new) for prompt in prompts]
        ours.run(wanted, Choice(), (), lambda prompt, token, finish: found[prompt].append(token), rows=rows)
        return found

    def by_transformers() -> list[list[int]]:
        out = theirs.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens: list[list[int]] = out[:, longest:].tolist()
        return tokens

    by_raypp(), by_transformers()
    ratios, speeds = [], []
    for _ in range(rounds):
        (own, mine), (other, his) = _timed(by_raypp), _timed(by_transformers)
        ratios.append(other / own)
        speeds.append((rows * new / own, rows * new / other))
    each = " | ".join(f"{statistics.median(speed[index] for speed in speeds):.0f}" for index in (0, 1))
    same = sum(a == b for a, b in zip(mine, his, strict=True))
    print(f"| {rows} | {longest} | {each} | {spread(ratios)} | {same} of {rows} |", flush=True)


def _timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    started = time.perf_counter()
    found = run()
    return time.perf_counter() - started, found


if __name__ == "__main__":
    main()
