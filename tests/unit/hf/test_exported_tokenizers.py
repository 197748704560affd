"""Exports on text: AutoTokenizer has raypp's ids, and AutoModelForCausalLM continues a text."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import written
from lazily import Lazily
from their_models import keys_of, options_in, their_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from raypp.errors import DataError, JobError
from raypp.job.known_families import FAMILIES
from raypp.job.models import DecoderOptions, OriginalFiles
from raypp.rank.data.tokenizer import ByteTokenizer, FileTokenizer
from raypp.state.checkpoint.commit import read_commit
from raypp.state.hf.import_model import import_hf
from raypp.state.hf.model_files import HfFiles
from raypp.storage.directory import DirectoryStore
from raypp.tools.export.export_model import export_hf
from raypp.tools.export.tokenizer_files import TokenizerFiles, bytes_tokenizer, tokenizer_files
from raypp.tools.inference.prompts import end_ids
from raypp.tools.inference.source import Source

transformers: Any = Lazily("transformers")
OURS = ByteTokenizer()
TEXTS = (
    "In the beginning", "  two  spaces,\ttabs\n\n and \r\n", "é漢字😀 \x00\x7f\xa0\xad", "<|endoftext|>",
    "before <|endoftext|> behind", "it 's n't . , ! ?", "",
)  # fmt: skip


def files_of(
    name: str | None, vocab_size: int, *, template: str | None = None, generation: bool = True
) -> TokenizerFiles:
    job = {"data": {"tokenizer": name, "chat_template": template, "seq_len": 64}}
    return tokenizer_files(job, None, DecoderOptions(vocab_size=vocab_size), generation=generation)


def folder_of(files: TokenizerFiles, folder: Path) -> Path:
    for name, content in files.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def any_text(seed: int, length: int) -> str:
    """Returns a text of all kinds of characters: half of them ASCII, the others from all planes."""
    draw = random.Random(seed)
    planes = [(0, 0x80), (0, 0x80), (0x80, 0xD800), (0xE000, 0x110000)]
    return "".join(chr(draw.randrange(*draw.choice(planes))) for _ in range(length))


def words_file(folder: Path, name: str = "tokenizer.json") -> Path:
    vocabulary = {"in": 0, "the": 1, "beginning": 2, "<|endoftext|>": 3, "<|im_end|>": 4, "?": 5}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / name))
    return folder / name


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    files = files_of("bytes", 257)
    return transformers.AutoTokenizer.from_pretrained(folder_of(files, tmp_path_factory.mktemp("bytes")))


@pytest.mark.parametrize("text", [*TEXTS, *(any_text(seed, 3000) for seed in range(4))])
def test_the_bytes_tokenizer_has_the_ids_of_raypp_and_gives_the_text_back(theirs: Any, text: str) -> None:
    ids = OURS.encode(text).tolist()
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text == theirs.decode([*ids, 256], skip_special_tokens=True)


def test_every_byte_has_its_id_and_256_ends_a_text(theirs: Any, tmp_path: Path) -> None:
    names = [theirs.convert_ids_to_tokens(byte) for byte in range(256)]
    assert [theirs.convert_tokens_to_ids(name) for name in names] == list(range(256))
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id) == (257, 256, 256)
    for seed in range(20):  # bytes that are no text: shown as Python shows them
        data = random.Random(seed).randbytes(50)
        assert theirs.decode(list(data)) == data.decode(errors="replace")
    (tmp_path / "bytes.json").write_bytes(bytes_tokenizer())
    again = FileTokenizer(tmp_path / "bytes.json")
    assert (again.vocab_size, again.eos_id) == (OURS.vocab_size, OURS.eos_id)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_no_model_type_changes_the_tokenizer(kind: str, tmp_path: Path) -> None:
    their_config(kind, keys_of(kind, "plain")).save_pretrained(tmp_path)
    folder_of(files_of("bytes", 257), tmp_path)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert all(found(text)["input_ids"] == OURS.encode(text).tolist() for text in TEXTS)


def exported(folder: Path, **other: Any) -> tuple[Path, tuple[str, ...]]:
    torch.manual_seed(3)
    written("llama", folder / "theirs", vocab_size=300)
    store, options = DirectoryStore(folder / "store"), options_in(folder / "theirs")
    import_hf(HfFiles(str(folder / "theirs")), store, "run", options, {"model": options.model_dump(mode="json")})
    done = export_hf(store, read_commit(store, "run", 0), DirectoryStore(folder / "out"), **other)
    return folder / "out", done.remarks


def test_an_exported_model_continues_texts(tmp_path: Path) -> None:
    out, remarks = exported(tmp_path, job={"data": {"tokenizer": "bytes", "seq_len": 64}})
    assert not remarks
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == ([2, 256], None)
    tokenizer.padding_side = "left"
    alone = [continued(model, tokenizer, [text])[0] for text in ("In the beginning", "é")]
    assert continued(model, tokenizer, ["In the beginning", "é"]) == alone
    assert all(alone)


def continued(model: Any, tokenizer: Any, texts: list[str]) -> list[list[int]]:
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        found = model.generate(**batch, max_new_tokens=8, do_sample=False)[:, batch["input_ids"].shape[1] :]
    assert all(isinstance(tokenizer.decode(row), str) for row in found)
    return [[token for token in row.tolist() if token != 256] for row in found]


def test_a_tokenizer_file_is_copied_with_the_files_beside_it(tmp_path: Path) -> None:
    source = words_file(tmp_path / "source")
    chat = "{% for message in messages %}{{ message.content }} <|im_end|> {% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "model_max_length": 77}
    (source.parent / "tokenizer_config.json").write_text(json.dumps(config))
    (source.parent / "chat_template.jinja").write_text(chat)
    (source.parent / "additional_chat_templates").mkdir()
    (source.parent / "additional_chat_templates" / "short.jinja").write_text("short")
    (source.parent / "generation_config.json").write_text('{"eos_token_id": 4, "top_p": 0.8, "pad_token_id": 5}')
    (source.parent / "notes.txt").write_text("not part of the tokenizer")
    files = files_of(str(source), 6)
    assert set(files.files) == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/short.jinja",
        "generation_config.json",
    }  # fmt: skip
    copied = {name: content for name, content in files.files.items() if name != "generation_config.json"}
    assert all(content == (source.parent / name).read_bytes() for name, content in copied.items())
    generation = json.loads(files.files["generation_config.json"])
    assert generation == {"eos_token_id": 4, "top_p": 0.8, "pad_token_id": 5} and files.ids["eos_id"] == 4
    again = transformers.AutoTokenizer.from_pretrained(folder_of(files, tmp_path / "out"))
    assert (again.eos_token, again.model_max_length) == ("<|im_end|>", 77)
    turns = [{"role": "user", "content": "in the beginning"}]
    assert again.apply_chat_template(turns, tokenize=False) == "in the beginning <|im_end|> "
    assert again("in the beginning")["input_ids"] == FileTokenizer(source).encode("in the beginning").tolist()


@pytest.mark.parametrize("name", ["bytes", "file"])
def test_the_template_that_a_run_was_given_is_that_of_the_export(name: str, tmp_path: Path) -> None:
    source = words_file(tmp_path / "source")
    (source.parent / "chat_template.jinja").write_text("the model's")
    (tmp_path / "given.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = "bytes" if name == "bytes" else str(source)
    files = files_of(tokenizer, 300, template=str(tmp_path / "given.jinja"))
    again = transformers.AutoTokenizer.from_pretrained(folder_of(files, tmp_path / "out"))
    assert again.apply_chat_template([{"role": "user", "content": "in"}], tokenize=False) == "in!"
    gone = files_of(tokenizer, 300, template="/nowhere/given.jinja")
    assert "the chat template was not exported" in gone.remarks[0] and "/nowhere/given.jinja" in gone.remarks[0]


def test_a_file_with_another_name_has_no_files_beside_it(tmp_path: Path) -> None:
    source = words_file(tmp_path / "source", "words.json")
    (source.parent / "chat_template.jinja").write_text("of another model")
    files = files_of(str(source), 6, generation=False)
    assert set(files.files) == {"tokenizer.json", "tokenizer_config.json"}
    again = transformers.AutoTokenizer.from_pretrained(folder_of(files, tmp_path / "out"))
    assert (again.eos_token_id, again.pad_token_id, again.chat_template) == (3, 3, None)


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    def remarks(name: str | None, vocab_size: int = 300) -> str:
        found = files_of(name, vocab_size)
        assert not found.files
        return "\n".join(found.remarks)

    assert "names no tokenizer, so none was exported; name one with --tokenizer FILE" in remarks(None)
    assert "/nowhere/tokenizer.json cannot be read" in remarks("/nowhere/tokenizer.json")
    assert "it has 257 ids, but the model has only 97" in remarks("bytes", 97)
    with pytest.raises(DataError, match=r"--tokenizer: .*does not exist"):
        tokenizer_files({}, "/nowhere/tokenizer.json", DecoderOptions(vocab_size=300))
    with pytest.raises(JobError, match="--tokenizer: bytes does not fit: it has 257 ids, but the model has only 97"):
        tokenizer_files({}, "bytes", DecoderOptions(vocab_size=97))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1]", "is not a JSON object"),
        (b"{", "generation_config.json was not copied but generated"),
        (b"[" * 100_000, "not copied but generated"),
    ],
)
def test_a_generation_config_that_is_none_is_not_copied(content: bytes, said: str, tmp_path: Path) -> None:
    source = words_file(tmp_path / "source")
    (source.parent / "generation_config.json").write_bytes(content)
    files = files_of(str(source), 6)
    assert said in files.remarks[0]
    assert json.loads(files.files["generation_config.json"]) == {"pad_token_id": 3, "eos_token_id": 3}


def test_another_tokenizer_can_be_named(tmp_path: Path) -> None:
    out, remarks = exported(tmp_path, tokenizer="bytes")
    assert not remarks and transformers.AutoTokenizer.from_pretrained(out)("a")["input_ids"] == [97]
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 2
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 256]


CHATML = "{% for m in messages %}{{ m.content }} <|im_end|>\n{% endfor %}"
CALLS = CHATML.replace("<|im_end|>", "{{ '?' if m.tool_calls else '<|im_end|>' }}")


@pytest.mark.parametrize(
    ("kind", "template", "ends"),
    [("chat", CHATML, [3, 4]), ("chat", CALLS, [3, 4, 5]), ("hf", CHATML, [3, 4]), ("text", CHATML, 3)],
)
def test_what_ends_a_learnt_turn_is_an_end_of_the_export(kind: str, template: str, ends: Any, tmp_path: Path) -> None:
    source = words_file(tmp_path / "source")
    special = [{"content": word, "id": at} for word, at in (("<|endoftext|>", 3), ("<|im_end|>", 4), ("?", 5))]
    tokens = {str(one["id"]): {"content": one["content"], "special": True} for one in special}
    config = {"eos_token": "<|endoftext|>", "chat_template": template, "added_tokens_decoder": tokens}
    (source.parent / "tokenizer_config.json").write_text(json.dumps(config))
    job: dict[str, Any] = {"data": {"kind": kind, "tokenizer": str(source)}}
    mixed = {"data": {"kind": "mixture", "parts": [{"kind": "text"}, {"kind": kind}], "tokenizer": str(source)}}
    original = OriginalFiles(config="{}", generation_config='{"eos_token_id": 3, "max_new_tokens": 7}')
    for options in (DecoderOptions(vocab_size=6), DecoderOptions(vocab_size=6, original=original)):
        for run in (job, mixed):
            written = tokenizer_files(run, None, options).files["generation_config.json"]
            assert json.loads(written)["eos_token_id"] == ends
    adapters = tokenizer_files(job, None, options, generation=False)
    assert ("turns end with <|im_end|>" in str(adapters.remarks)) == (ends != 3)
    source_of = Source("here", {"vocab_size": 6}, 32, "fp32", str(source), run="mine", document=job)
    assert end_ids(source_of, FileTokenizer(source)) == tuple([ends] if ends == 3 else ends)
