"""Tasks of lm-evaluation-harness on a trained model: the harness's model interface."""

import difflib
import logging
import multiprocessing
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate as evaluate_tasks
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from raypp.errors import JobError, Problem, UnreachableError, causes, in_words
from raypp.rank.data.tokenizer import framed, lacking
from raypp.stages.pipeline.decode import Choice
from raypp.tools.inference.prompts import Answer, Encoded
from raypp.tools.inference.source import Source
from raypp.tools.inference.task_model import Scored, TaskModel

TASKS = "--tasks"
_NETWORK = ("httpx", "requests", "urllib3", "huggingface_hub", "aiohttp")
_SHOWN = 300
_SEED = 1234
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NEW_TOKENS = 256


class _TooLong(Exception):
    """A continuation that no row holds: the index of its request, and its tokens."""

    def __init__(self, index: int, length: int) -> None:
        super().__init__(index, length)
        self.index, self.length = index, length


class PipelineLM(TemplateLM):  # type: ignore[misc]
    """A trained model as the harness sees it. `source`: the model. `model`: rank 0's part of it."""

    def __init__(self, source: Source, model: TaskModel) -> None:
        super().__init__()
        self._source, self._model, self._max_length = source, model, source.context
        self._tokenizer = source.open_tokenizer()

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.identity

    @property
    def prefix_token_id(self) -> int:
        """The context of a text that has none: the beginning, or the end if there is none."""
        beginning = self._tokenizer.bos_id
        return self.eot_token_id if beginning is None else beginning

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the ids of a text, with what the tokenizer puts around it unless that is refused.
        Raises JobError: the model has no row for one of them."""
        ids = self._tokenizer.encode(string)
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._tokenizer.shown([self.prefix_token_id]))
        if add_special_tokens:
            ids, _ = framed(self._tokenizer, ids)
        if fault := lacking(self._tokenizer, ids, int(self._source.model["vocab_size"])):
            raise JobError(Problem(TASKS, f"a text has {fault}", "leave out the task"))
        return [int(one) for one in ids]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Scores continuations of texts. Raises JobError: one exceeds the model's context."""
        try:
            scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        except _TooLong as error:
            task, most = requests[error.index].task_name, self._max_length
            fault = f"{task} has a continuation of {error.length} tokens, but the model's context has {most}"
            fix = "leave out the task, or use a model with a longer context"
            raise JobError(Problem(TASKS, fault, fix)) from None
        return scores

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores continuations. A context that is too long loses its first tokens."""
        most = self._max_length + 1
        for index, (_, _, rest) in enumerate(requests):
            if len(rest) >= most:
                raise _TooLong(index, len(rest))
        rows = [Scored((context + rest)[-most:], len(rest)) for _, context, rest in requests]
        return [(score.logprob, score.greedy) for score in self._model.score(rows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of whole texts, in windows of the model's context."""
        rows: list[list[tuple[Any, list[int], list[int]]]] = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            rows.append([(None, *make_disjoint_window(window)) for window in windows])
        scores = iter(self._loglikelihood_tokens([window for windows in rows for window in windows]))
        return [sum(next(scores)[0] for _ in windows) for windows in rows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues texts up to a stop sequence. A context that leaves no room for the new tokens
        loses its first tokens."""
        prompts, stops, choices = [], [], set()
        for text, settings in (request.args for request in requests):
            limit = next((settings[name] for name in _LIMITS if settings.get(name) is not None), _NEW_TOKENS)
            if not 0 < limit < self._max_length:
                fault = f"asks for {limit} new tokens, but the model's context has {self._max_length}"
                raise JobError(Problem(TASKS, fault, "set max_gen_toks in the task's generation_kwargs"))
            tokens = self.tok_encode(text) or [self.prefix_token_id]  # something to continue
            prompts.append(Encoded(text, tokens[limit - self._max_length :], limit))
            until = settings.get("until") or []
            stops.append([until] if isinstance(until, str) else list(until))
            drawn = settings.get("do_sample", False)
            choices.add((settings.get("temperature") or 1.0, settings.get("top_p") or 1.0) if drawn else (0.0, 1.0))
        answers = [Answer(prompt) for prompt in prompts]
        if len(choices) > 1:
            raise JobError(Problem(TASKS, "samples with several temperatures at once", "run the tasks one by one"))
        for temperature, top_p in choices:
            generated = self._model.generate(prompts, Choice(temperature, top_p, _SEED))
            for answer, (tokens, finish) in zip(answers, generated, strict=True):
                for index, token in enumerate(tokens, start=1):
                    answer.add(token, finish if index == len(tokens) else None)
        texts = [self._tokenizer.decode(answer.tokens) for answer in answers]  # alone, as the harness does
        return [before_first(text, stop) for text, stop in zip(texts, stops, strict=True)]


def before_first(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.index(stop) for stop in stops if stop and stop in text), default=len(text))]


def load_tasks(names: Sequence[str], where: str = "") -> dict[str, dict[str, Any]]:
    """Loads tasks and their data, as the harness's `TaskManager.load`. `names`: of tasks, or paths
    of YAML files. `where`: follows the name of a missing file: ` on node …`. Raises JobError: there
    is no such task, or it cannot be loaded. Raises UnreachableError: a task needs the network."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager()
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        if name.endswith((".yaml", ".yml")):
            if not Path(name).is_file():
                raise JobError(Problem(TASKS, f"there is no file {name}{where}", "check the path"))
        elif name not in manager.task_index:
            close = difflib.get_close_matches(name, manager.all_tasks, n=3)
            fix = f"did you mean {', '.join(close)}?" if close else "name one of the harness, or a YAML file"
            raise JobError(Problem(TASKS, f"there is no task {name!r}", fix))
        try:
            for part, objects in manager.load([name]).items():
                loaded[part] |= objects
        except Exception as error:  # the harness and its libraries raise anything
            raise _not_loaded(name, error) from error
    for task in loaded["tasks"].values():  # as the harness's own command does
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_SEED)
    return loaded


def _not_loaded(name: str, error: Exception) -> JobError | UnreachableError:
    reason = " ".join(in_words(error).split())[:_SHOWN]
    for cause in causes(error):
        if isinstance(cause, ConnectionError) or type(cause).__module__.partition(".")[0] in _NETWORK:
            fix = "run it where there is a network, or use a task whose data are on this machine"
            return UnreachableError(Problem(TASKS, f"the data of {name} cannot be fetched: {reason}", fix))
    return JobError(Problem(TASKS, f"{name} cannot be loaded: {reason}", "check the task's YAML file and its data"))


def results(source: Source, model: TaskModel, tasks: Sequence[str], limit: int | None) -> dict[str, Any]:
    """Runs tasks on a model. Returns `tasks`: metrics by task, as the harness names them. `tasks`:
    names, or paths of YAML files. `limit`: documents of each task. None: all."""
    random.seed(0)
    np.random.seed(_SEED)
    lm = PipelineLM(source, model)
    _pools_without_fork()
    evaluated = evaluate_tasks(lm=lm, task_dict=load_tasks(tasks), limit=limit, log_samples=False)
    assert evaluated is not None
    by_task = {
        task: {k: value for k, value in metrics.items() if k != "sample_len" and isinstance(value, int | float)}
        for task, metrics in evaluated["results"].items()
    }
    return {"tasks": by_task}


def _pools_without_fork() -> None:
    """Makes pools of processes start from a process without threads. The harness estimates some
    errors in a pool of forks. This process has threads, of Ray or gloo, and a fork copies the locks
    that they hold: it could wait forever."""
    multiprocessing.set_forkserver_preload(["__main__", "lm_eval.api.metrics"])
    multiprocessing.set_start_method("forkserver", force=True)
