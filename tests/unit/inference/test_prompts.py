"""Prompts: files, limits, and text that comes in pieces."""

import json
import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from raypp.errors import DataError, JobError
from raypp.rank.data.chat_files import end_of_turn
from raypp.rank.data.chat_template import ChatTemplate
from raypp.rank.data.tokenizer import ByteTokenizer, open_tokenizer
from raypp.tools.inference.prompts import Answer, Encoded, chat_end_ids, encode_prompts, end_ids, read_prompts
from raypp.tools.inference.source import Source

SOURCE = Source("here", {"vocab_size": 257}, 32, "fp32", "bytes", run="mine")


def test_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "id": 3}\n\n{"prompt": "b\\nc"}\r\n')
    assert read_prompts(file) == ["a", "b\nc"]


def test_malformed_lines_are_named_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": 3}\nno\n{"text": "a"}\n["a"]\n\xff\n{}\n{"prompt": null}\n')
    with pytest.raises(DataError) as raised:
        read_prompts(file)
    said = str(raised.value)
    assert all(f"p.jsonl:{line}" in said for line in (2, 3, 4, 5, 6)) and "p.jsonl:7" not in said
    assert said.endswith("--prompts: and 2 more lines")


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match="has no prompts"):
        read_prompts(file)
    with pytest.raises(DataError, match="does not exist"):
        read_prompts(tmp_path / "other")


def test_prompts_and_their_answers_fit_into_the_context() -> None:
    tokenizer = ByteTokenizer()
    (found,) = encode_prompts(SOURCE, tokenizer, ["x" * 30], None)
    assert (len(found.tokens), found.limit) == (30, 2), "to the end of the context"
    assert encode_prompts(SOURCE, tokenizer, ["x"], 31)[0].limit == 31
    for texts, new, said in (
        (["x" * 32], None, "--prompt: has 32 tokens, but the context of here ends at 32"),
        (["x"], 32, "--prompt: has 1 tokens: with 32 new ones it exceeds the context of 32"),
        (["x", ""], None, "prompt 2: is empty"),
        (["x", "\ud800"], None, "prompt 2: cannot be encoded"),
        ([""] * 9, None, "and 4 more prompts"),
    ):
        with pytest.raises(JobError, match=said):
            encode_prompts(SOURCE, tokenizer, texts, new)


def test_prompts_have_the_special_tokens_of_their_model(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<bos>": 0, "<eos>": 1, "in": 2, "the": 3, "?": 4}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing("<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)])
    words.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    model = Source("here", {"vocab_size": 5}, 32, "fp32", None)
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    for one in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        (found,) = encode_prompts(model, one, ["in the beginning"], None)
        assert found.tokens == theirs("in the beginning")["input_ids"] == [0, 2, 3, 4, 1]
        (found,) = encode_prompts(SOURCE, one, ["in the beginning"], None)
        assert found.tokens == [0, 2, 3, 4], "without the end, which would end the text"
    old = open_tokenizer(str(tmp_path / "tokenizer.json"), False)
    assert encode_prompts(SOURCE, old, ["in the"], None)[0].tokens == [2, 3]


def test_text_comes_in_whole_characters() -> None:
    tokenizer = ByteTokenizer()
    answer = Answer(Encoded("", list("é: ".encode()), 9))
    pieces = []
    data = "aß€!".encode()
    for index, token in enumerate(data):
        answer.add(token, "length" if index == len(data) - 1 else None)
        pieces.append(answer.news(tokenizer))
    assert pieces == ["a", "", "ß", "", "", "€", "!"]
    assert answer.text(tokenizer) == "aß€!"


def test_the_token_that_ends_a_text_is_no_part_of_it() -> None:
    answer = Answer(Encoded("", [65], 9))
    answer.add(66, None)
    answer.add(256, "eos")
    assert (answer.tokens, answer.finish, answer.text(ByteTokenizer())) == ([66], "eos", "B")


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ""),
        ("{{ raise_exception('only questions') }}", ""),
    ],
)
def test_the_end_of_a_turn_is_what_the_template_writes_behind_it(template: str, end: str) -> None:
    assert end_of_turn(ChatTemplate(template, {"eos_token": "</s>"})) == end


def test_an_answer_ends_where_its_turn_does() -> None:
    tokenizer = ByteTokenizer()
    answer = Answer(Encoded("", [65], 99), stop="<|im_end|>")
    pieces = []
    for token in b"a <|b <|im_end|>\n<|im_start|>":
        answer.add(token, None)
        pieces.append(answer.news(tokenizer))
    assert "".join(pieces) == answer.text(tokenizer) == "a <|b "
    assert pieces[:6] == ["a", " ", "", "", "<|b", " "], "what may become the end waits"
    unfinished = Answer(Encoded("", [65], 4), stop="<|im_end|>")
    for index, token in enumerate(b"a<|i"):
        unfinished.add(token, "length" if index == 3 else None)
    assert unfinished.news(tokenizer) == "a<|i"


def test_an_end_of_turn_that_is_one_token_ends_a_conversation_and_those_of_the_model_do(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "<|endoftext|>": 1, "<|im_end|>": 2, "b": 3, "<|im_start|>": 4}
    added = [
        {"id": vocabulary[word], "content": word, "special": True, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for word in ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
    ]  # fmt: skip
    document = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document | {"added_tokens": added}))
    tokenizer, template = open_tokenizer(str(tmp_path / "tokenizer.json")), ChatTemplate(CHATML)
    run = Source("here", {"vocab_size": 5}, 32, "fp32", str(tmp_path / "tokenizer.json"), run="mine")
    assert end_ids(run, tokenizer) == (1,) and chat_end_ids(run, tokenizer, template) == (1, 2)
    named = Source("here", {"vocab_size": 5}, 32, "fp32", None, eos_ids=(3,))
    assert end_ids(named, tokenizer) == (3,) and chat_end_ids(named, tokenizer, template) == (3, 2)
    assert chat_end_ids(SOURCE, ByteTokenizer(), template) == (256,), "ten bytes are no token"
