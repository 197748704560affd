"""Texts that the model continues during training, decoded on the pipeline that trains.

Samples are taken between two steps and change no bit of the training.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from raypp.errors import JobError, Problem
from raypp.job.job import SampleOptions
from raypp.rank.assemble import AssembledRank
from raypp.rank.data.tokenizer import framed, lacking, open_tokenizer
from raypp.records import Event
from raypp.stages.parallel.apply import compute_dtype
from raypp.stages.parallel.compute_copies import computing
from raypp.stages.parallel.rank_groups import check_groups
from raypp.stages.pipeline.decode import LENGTH, Choice, PipelineDecoder, Prompt, length_that_changes_keys

_SHOWN = 160


class Sampler:
    """Continues the prompts of `train.sample`, always with the most likely token. `mark`: called
    with each token, which shows that the rank does not hang. Raises JobError: a prompt has no
    tokens, or does not fit into `data.seq_len`; DataError: the tokenizer cannot be read."""

    def __init__(self, rank: AssembledRank, mark: Callable[[str], None] = lambda token: None) -> None:
        self._mark = mark
        job = rank.job
        assert job.train.sample is not None
        self._options: SampleOptions = job.train.sample
        self._tokenizer = open_tokenizer(job.data.tokenizer, job.data.add_bos, job.data.added_tokens)
        limit = self._options.max_new_tokens
        self._prompts = []
        for index, text in enumerate(self._options.prompts):
            whole, before = framed(self._tokenizer, ids := self._tokenizer.encode(text))
            tokens = tuple(whole[: before + len(ids)].tolist())
            if what := lacking(self._tokenizer, tokens, job.model.vocab_size):
                raise JobError(Problem(f"train.sample.prompts[{index}]", f"has {what}", "change the prompt"))
            if not tokens or len(tokens) + limit > job.data.seq_len:
                what = f"has {len(tokens)} tokens: with {limit} new ones it exceeds data.seq_len, {job.data.seq_len}"
                fix = "shorten it, or lower train.sample.max_new_tokens" if tokens else "write at least one token"
                raise JobError(Problem(f"train.sample.prompts[{index}]", what, fix))
            self._prompts.append(Prompt(tokens, limit))
        self._decoder = decoder_on(rank)
        self._stages = self._decoder.stages

    def run(self, step: int, attempt: int) -> Event:
        """Returns the `sampled` event of the weights after `step`. Collective over the world: all
        ranks must call it after the same step."""
        tokens: list[list[int]] = [[] for _ in self._prompts]
        finishes = [LENGTH for _ in self._prompts]

        def emit(prompt: int, token: int, finish: str | None) -> None:
            if finish in (None, LENGTH):
                tokens[prompt].append(token)
            finishes[prompt] = finish or LENGTH
            self._mark(f"token {len(tokens[prompt])} of prompt {prompt}")

        # Replicas gather weights together: none may end before the others.
        ends = [self._tokenizer.eos_id]
        with computing(self._stages.values()):
            self._decoder.run(self._prompts, Choice(), ends, emit, rows=len(self._prompts), stop_early=False)
        for stage in self._stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # gathered weights must not outlive the next optimizer step
        check_groups()  # after an abort, tokens may come from what was never received
        samples = [
            {"prompt": text, "text": self._tokenizer.decode(generated), "tokens": generated, "finish": finish}
            for text, generated, finish in zip(self._options.prompts, tokens, finishes, strict=True)
        ]
        words = "; ".join(f"{sample['prompt']}|{sample['text']}"[:_SHOWN] for sample in samples)
        return Event("sampled", words, attempt=attempt, step=step, details={"samples": samples})


def decoder_on(rank: AssembledRank) -> PipelineDecoder:
    """Returns a decoder on the stages of an assembled rank."""
    groups = rank.groups
    return PipelineDecoder(
        dict(zip(rank.pipeline.stages_of_rank[groups.coordinates.pp], rank.built.modules, strict=True)),
        rank.pipeline.rank_of_stage,
        groups.coordinates.pp,
        rank.job.model.hidden_size,
        compute_dtype(rank.job),
        rank.device,
        groups.forward,
        dist.get_process_group_ranks(groups.forward),
        rank.attention,
        length_that_changes_keys(rank.job.model),
    )
