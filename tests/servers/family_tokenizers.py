"""Small tokenizers, each with the shape and the files of one model family's."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_TEXT = Path(__file__).parents[2] / "jobs" / "data" / "kjv-new-testament.txt"
_GPT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PIECES = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def _bytes(specials: list[str], pattern: str | None = None) -> Tokenizer:
    """Byte-level BPE, whose special tokens come behind its vocabulary."""
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(_lines(), trainer)
    made.add_special_tokens(specials)
    return made


def _pieces(specials: list[str], how: str) -> Tokenizer:
    """BPE of SentencePiece's kind, with bytes for what it lacks; its special tokens come first."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*specials, *bytes_], show_progress=False)
    trained.train_from_iterator([f" {line}" for line in _lines()], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    made = Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.add_special_tokens(specials)
    made.decoder = _PIECES
    if how == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif how == "plain":
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=how, split=False)
    return made


def _lines() -> list[str]:
    return _TEXT.read_text(encoding="utf-8").splitlines()[:300]


def _before(made: Tokenizer, *names: str, after: str = "") -> Tokenizer:
    ids = [(name, made.token_to_id(name)) for name in dict.fromkeys((*names, *([after] if after else [])))]
    single = " ".join([*names, "$A", *([after] if after else [])])
    made.post_processor = processors.TemplateProcessing(single, f"{single} $B", ids)
    return made


FAMILIES = (
    "llama2", "llama2-metaspace", "llama3", "mistral", "mistral-im-end", "gemma", "qwen", "qwen-base", "phi3",
    "deepseek", "olmo", "smollm", "starcoder2", "stablelm", "gpt-oss", "ends-of-model", "map-only", "unlisted-special",
    "with-end",
)  # fmt: skip


def write_family(name: str, folder: Path) -> Path:
    spm = ["<unk>", "<s>", "</s>"]
    roles: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    more: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    beside: dict[str, Any] = {}
    if name == "llama2":
        made = _before(_pieces(spm, "prepend"), "<s>")
        more |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": True}
        roles = {key: value and _token(value) for key, value in roles.items()}
    elif name == "llama2-metaspace":
        made = _before(_pieces(spm, "first"), "<s>")
        more |= {"tokenizer_class": "LlamaTokenizerFast", "legacy": False}
    elif name == "llama3":
        words = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
        made = _before(_bytes(words, _GPT), words[0])
        roles = {"bos_token": words[0], "eos_token": words[1]}
        beside["generation_config.json"] = {"eos_token_id": [401, 402], "bos_token_id": 400}
    elif name == "mistral":
        made = _before(_pieces(spm, "prepend"), "<s>")
        more |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "added_tokens_decoder": _decoder(made)}
    elif name == "mistral-im-end":
        made = _before(_pieces([*spm, "<|im_start|>", "<|im_end|>"], "prepend"), "<s>")
        roles |= {"eos_token": "<|im_end|>", "pad_token": "</s>"}
    elif name == "gemma":
        made = _before(_pieces(["<pad>", "<eos>", "<bos>", "<unk>", "</s>"], "plain"), "<bos>")
        roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
        more |= {"tokenizer_class": "GemmaTokenizer"}
    elif name in ("qwen", "qwen-base"):
        made = _bytes(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], _GPT)
        made.normalizer = normalizers.NFC()
        made.post_processor = processors.ByteLevel(trim_offsets=False)
        end = "<|im_end|>" if name == "qwen" else "<|endoftext|>"
        roles = {"bos_token": None, "eos_token": end, "pad_token": "<|endoftext|>", "unk_token": None}
        more |= {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "added_tokens_decoder": _decoder(made)}
        beside["generation_config.json"] = {"eos_token_id": [402, 400], "bos_token_id": 400}
    elif name == "phi3":
        made = _pieces([*spm, "<|endoftext|>", "<|assistant|>", "<|end|>"], "prepend")
        roles |= {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
        more |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "added_tokens_decoder": _decoder(made)}
    elif name == "deepseek":
        words = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
        made = _before(_bytes(words), words[0])
        roles = {"bos_token": _token(words[0]), "eos_token": _token(words[1]), "pad_token": _token(words[1])}
        more |= {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    elif name == "olmo":
        made = _bytes(["|||IP_ADDRESS|||", "<|padding|>", "<|endoftext|>"])
        roles = {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|padding|>"}
    elif name == "smollm":
        made = _bytes(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        roles = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
        more |= {"tokenizer_class": "GPT2Tokenizer", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    elif name == "starcoder2":
        made = _bytes(["<|endoftext|>", "<fim_prefix>"])
        roles = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
        more |= {"tokenizer_class": "GPT2Tokenizer"}
    elif name == "stablelm":
        made = _bytes(["<|endoftext|>", "<|padding|>"])
        roles = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
        more |= {"tokenizer_class": "GPTNeoXTokenizerFast", "add_prefix_space": False}
    elif name == "gpt-oss":
        made = _bytes(["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>"], _GPT)
        roles = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
        beside["generation_config.json"] = {"eos_token_id": [402, 401, 403]}
    elif name == "ends-of-model":
        made = _bytes(["<one>", "<two>"])
        roles, beside["config.json"] = {}, {"model_type": "granite", "eos_token_id": [401, 400]}
    elif name == "map-only":  # without added_tokens_decoder the map comes before the configuration
        made = _before(_pieces([*spm, "<stop>"], "always"), "<s>")
        beside["special_tokens_map.json"] = {"eos_token": _token("<stop>"), "pad_token": "</s>"}
    elif name == "unlisted-special":  # the end is an ordinary word of tokenizer.json, the padding not even that
        made = _bytes(["<|endoftext|>"])
        roles = {"eos_token": "er", "pad_token": "<more>", "bos_token": None}
    else:
        made = _before(_bytes(["<s>", "</s>"]), "<s>", after="</s>")
        roles = {"bos_token": "<s>", "eos_token": "</s>"}
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    beside["tokenizer_config.json"] = {**roles, **more, "model_max_length": 4096}
    for file, content in beside.items():
        (folder / file).write_text(json.dumps(content))
    return folder / "tokenizer.json"


def _token(content: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


def _decoder(made: Tokenizer) -> dict[str, Any]:
    return {str(index): _flags(token) for index, token in made.get_added_tokens_decoder().items()}


def _flags(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}
