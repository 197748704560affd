"""`data.added_tokens`: the rows that they need in the model, and what their owner should know."""

from dataclasses import replace
from textwrap import shorten

from pydantic import ValidationError

from raypp.errors import DataError, JobError, Problem
from raypp.job.job_file import JobFile
from raypp.job.lora import trains_part
from raypp.job.tokenizer_file import tokenizer_path
from raypp.rank.data.tokenizer import FileTokenizer
from raypp.untrusted.text import visible

_KEY = "data.added_tokens"


def with_rows(file: JobFile) -> JobFile:
    """Returns a job file whose model has a row for every token of `data.added_tokens`, with remarks
    on them. Only a model of `model.from_hf` grows; of others, `model.vocab_size` is the user's.
    Raises JobError: the tokenizer is `bytes`, the model cannot grow, or it freezes the new rows."""
    data, model = file.job.data, file.job.model
    if not data.added_tokens:
        return file
    if data.tokenizer == "bytes":
        fault = "the bytes tokenizer takes no further tokens"
        raise JobError(file.locate(Problem(_KEY, fault, "set data.tokenizer to a tokenizer.json or its folder")))
    try:
        tokenizer = FileTokenizer(tokenizer_path(data.tokenizer), data.add_bos, data.added_tokens)
    except DataError:  # whoever reads the data reports it
        return file
    words = {text: f"{visible(text)} (id {number})" for text, number in tokenizer.added.items()}
    lists = ([words[text] for text in words if (text in tokenizer.new) == is_new] for is_new in (True, False))
    (new, there), remarks = (shorten(", ".join(one), 300, placeholder=" …") for one in lists), []
    if there:
        remarks.append(f"{_KEY}: the tokenizer has {there} already")
    if new:
        remarks.append(f"{_KEY}: {new} will be new")
    if new and model.from_hf is not None:
        if not trains_part(model, "embed_tokens"):
            fault = f"the embedding is frozen, so nothing would be learnt of {new}"
            fix = f"use [embed_tokens, lm_head], or leave {_KEY} out"
            raise JobError(file.locate(Problem("model.lora.also_train", fault, fix)))
        if not trains_part(model, "lm_head"):
            what = "the head is frozen, so the model learns to read these tokens, but not to write them"
            remarks.append(f"{_KEY}: {what}: to change that, add lm_head to model.lora.also_train")
        if tokenizer.vocab_size > model.vocab_size:
            remarks.append(f"model.vocab_size goes from {model.vocab_size} to {tokenizer.vocab_size}, for {_KEY}")
            try:
                model = type(model).model_validate({**model.model_dump(), "vocab_size": tokenizer.vocab_size})
            except ValidationError as error:
                fault = f"the model cannot have {tokenizer.vocab_size} rows: {error.errors()[0]['msg']}"
                fix = "use reserved tokens that the tokenizer has"
                raise JobError(file.locate(Problem(_KEY, fault, fix))) from None
    job = file.job.model_copy(update={"model": model})
    return replace(file, job=job, remarks=(*file.remarks, *remarks))
