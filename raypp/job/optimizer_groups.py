"""Parameters with a rate or a decay of their own: `train.optimizer.groups`."""

import difflib
import re
from collections.abc import Iterator, Sequence

from raypp.errors import Problem
from raypp.job.family import embedding, final_norm, projection
from raypp.job.job import Job, ParameterGroup
from raypp.job.known_families import family_of
from raypp.job.lora import also_trained, layer_adapters
from raypp.job.models import DecoderOptions

KEY = "train.optimizer.groups"


def group_of(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    """Returns the group that a parameter with a global name belongs to; None: no group."""
    return next((group for group in groups if re.search(group.match, name)), None)


def trained_names(model: DecoderOptions) -> list[str]:
    """Returns the global names of what is trained; empty for a model of the user's own."""
    family = family_of(model)
    if family is None:
        return []
    if model.lora is None:
        ends = [embedding(model), *final_norm(model), *([] if model.tie_embeddings else [projection(model)])]
        names = [weight.name for weight in ends]
    else:
        names = list(also_trained(model))
    for index in range(model.num_layers):
        weights = family.weights(model, index)
        if model.lora is not None:
            weights = [weight for adapter in layer_adapters(model, index) for weight in (adapter.a, adapter.b)]
        names += [f"model.layers.{index}.{weight.name}" for weight in weights]
    return names


def matched(names: Sequence[str], groups: Sequence[ParameterGroup]) -> list[list[str]]:
    """Returns the names that each group's expression matches."""
    return [[name for name in names if re.search(group.match, name)] for group in groups]


def group_problems(names: Sequence[str], groups: Sequence[ParameterGroup]) -> Iterator[Problem]:
    """Finds groups that match none of the names of all trained parameters, or one of another."""
    found = matched(names, groups)
    for index, (group, own) in enumerate(zip(groups, found, strict=True)):
        if not own:
            close = difflib.get_close_matches(group.match, names, n=1, cutoff=0.0)
            fix = f"names are such as {close[0]}; with model.lora, only adapters and also_train are trained"
            yield Problem(f"{KEY}[{index}].match", f"{group.match!r} matches no trained parameter", fix)
        for other in range(index):
            if both := sorted(set(own) & set(found[other])):
                fault = f"groups[{other}] matches {both[0]}, too" + (f", and {len(both) - 1} more" * (len(both) > 1))
                yield Problem(f"{KEY}[{index}].match", fault, "write expressions that have no name in common")


def check_groups(job: Job) -> Iterator[Problem]:
    """Checks the groups of a job. Of a model of the user's own, ranks check the names."""
    groups, valid = job.train.optimizer.groups, True
    for index, group in enumerate(groups):
        try:
            re.compile(group.match)
        except (re.error, RecursionError, OverflowError) as error:
            valid = False
            yield Problem(f"{KEY}[{index}].match", f"is no regular expression: {error}", "for example embed|lm_head")
    if valid and groups and (names := trained_names(job.model)):
        yield from group_problems(names, groups)
