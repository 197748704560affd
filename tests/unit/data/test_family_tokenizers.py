"""Beginning, end and ids of texts are those of transformers, for each family's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_tokenizers import FAMILIES, write_family
from lazily import Lazily

from raypp.data.rows import Encoded, RowEncoder
from raypp.data.tokenizer import FileTokenizer, document_of, framed, open_tokenizer
from raypp.errors import DataError

transformers: Any = Lazily("transformers")
TEXTS = (
    "In the beginning was the Word",
    " two  spaces\n\nand é 漢字 😀",
    "it's 12",
    "x",
    "<s> within </s> a <|im_end|>text",
)
PREPEND = ("llama2", "mistral", "phi3")
PAIRS = (
    ("answer:\n", "it is here."),
    ("the answer: ", "it is here."),
    ("what? answer:", " here\n"),
    ("wor", "ld"),
    ("", "so"),
)


def theirs_of(path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path.parent)


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = write_family(name, tmp_path / name)
    theirs, ours = theirs_of(path), open_tokenizer(str(path.parent))
    assert isinstance(ours, FileTokenizer) and not ours.remarks
    if name == "ends-of-model":
        assert theirs.eos_token_id is None and ours.eos_id == 401, "the first that config.json names"
    else:
        assert ours.eos_id == theirs.eos_token_id
    assert (ours.bos_id, ours.pad_id) == (theirs.bos_token_id, theirs.pad_token_id)
    # LlamaTokenizer of transformers 5 has its own rules for the space before a text.
    file = theirs if name not in PREPEND else transformers.PreTrainedTokenizerFast.from_pretrained(path.parent)
    for text in TEXTS:
        expected = file(text)["input_ids"]
        assert (name in PREPEND and not text[0].isalnum()) or theirs(text)["input_ids"] == expected
        if text.startswith("<s>") and expected[:2] == [theirs.bos_token_id] * 2:
            expected = expected[1:]  # a text that has its beginning gets no second one
        assert framed(ours, ours.encode(text))[0].tolist() == expected
        document = document_of(ours, ours.encode(text))[0].tolist()
        assert document == (expected if name == "with-end" else [*expected, ours.eos_id])


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_and_completion_are_one_text_cut_at_the_border(name: str, tmp_path: Path) -> None:
    path = write_family(name, tmp_path / name)
    theirs, ours = theirs_of(path), FileTokenizer(path)
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
    for (prompt, completion), found in zip(PAIRS, RowEncoder(ours).encode(rows), strict=True):
        assert isinstance(found, Encoded)
        whole = theirs(prompt + completion, return_offsets_mapping=True)
        end = [] if name == "with-end" else [ours.eos_id]
        assert found.ids.tolist() == [*whole["input_ids"], *end]
        begun, count = len(ours.before), len(ours.encode(prompt + completion))
        offsets = whole["offset_mapping"][begun : begun + count]
        first = next(index for index, (_, stop) in enumerate(offsets) if stop > len(prompt))
        assert found.loss.tolist()[begun + first :] == [True] * (len(found.ids) - begun - first)
        assert not prompt or not found.loss[: begun + first].any()
        learnt = ours.shown(found.ids[found.loss].tolist())
        assert completion.strip() in learnt and "answer" not in learnt


def test_data_show_shows_ids_as_they_are(tmp_path: Path) -> None:
    ours = FileTokenizer(write_family("llama2", tmp_path))
    ids = ours.encode("it is").tolist()
    assert ours.shown(ids) == " it is", "the space that the tokenizer puts before a text is one of its tokens"
    assert "".join(ours.shown([one]) for one in ids) == " it is"


def test_a_job_decides_what_texts_begin_with(tmp_path: Path) -> None:
    path = write_family("phi3", tmp_path / "phi3")
    ids = FileTokenizer(path).encode("in")
    assert FileTokenizer(path).before == () and FileTokenizer(path, True).before == (1,)
    path = write_family("llama2", tmp_path / "llama2")
    assert [FileTokenizer(path, how).before for how in ("auto", True, False)] == [(1,), (1,), ()]
    off = FileTokenizer(path, False)
    assert "data.add_bos is false: texts do not get <s>" in off.remarks[0]
    assert document_of(off, ids)[0].tolist() == [*ids.tolist(), 2]
    path = write_family("qwen", tmp_path / "qwen")
    assert FileTokenizer(path, True).before == (400,), "the bos_token_id of generation_config.json"
    (path.parent / "generation_config.json").unlink()
    with pytest.raises(DataError, match=r"data\.add_bos: no file beside .* names a beginning of texts"):
        FileTokenizer(path, True)
    with pytest.raises(DataError, match=r"data\.add_bos: the bytes tokenizer has no token"):
        open_tokenizer("bytes", True)


def test_a_lone_tokenizer_takes_its_end_from_a_list_and_says_so(tmp_path: Path) -> None:
    path = write_family("mistral-im-end", tmp_path)
    (path.parent / "tokenizer_config.json").unlink()
    alone = FileTokenizer(path)
    assert alone.eos_id == 2 and "names its end of text: </s> is taken" in alone.remarks[0]
    (path.parent / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not a JSON object"):
        FileTokenizer(path)


def test_a_token_that_the_model_lacks_is_told_with_its_place(tmp_path: Path) -> None:
    path = write_family("olmo", tmp_path)
    document = json.loads(path.read_text())
    pad = {**document["added_tokens"][0], "content": "<new>", "id": 403}
    path.write_text(json.dumps({**document, "added_tokens": [*document["added_tokens"], pad]}))
    ours = FileTokenizer(path)
    assert ours.vocab_size == 404
    good, bad = RowEncoder(ours, text_key="text", vocab_size=403).encode([{"text": "a <b"}, {"text": "a <new> b"}])
    assert isinstance(good, Encoded) and np.max(good.ids) == 402
    assert str(bad) == "has the token '<new>' (id 403), but model.vocab_size is 403"
