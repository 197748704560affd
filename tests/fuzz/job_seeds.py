"""Job files and `--set`s that nobody sane writes: seeds of `job_files`."""

from __future__ import annotations

from collections.abc import Iterator

# fmt: off

HEAD = "name: a\ndata: {kind: synthetic}\n"
SEPARATOR = "\x1e"
"""Between several `--set`s."""
_DIGITS = "9" * 5000


def files() -> Iterator[bytes]:
    """Yields job files."""
    for text in _texts():
        yield text if isinstance(text, bytes) else text.encode()


def overrides() -> Iterator[bytes]:
    """Yields one or more `--set`s."""
    for settings in _settings():
        together = settings if isinstance(settings, str) else SEPARATOR.join(settings)
        yield together.encode("utf-8", "surrogateescape")


def _texts() -> Iterator[bytes | str]:
    # Aliases and merges.
    yield from (
        "name: a\nmesh: &m\n  pp: 1\n  x: *m\n", "a: &a [1, *a]\n", "name: a\nmesh: &m\n  pp: 1\n  <<: *m\n",
        "name: a\nmesh: &m\n  <<: [*m, *m]\n", "name: *nothing\n", "name: &a a\nmesh: &a {pp: 1}\n", "name: <<\n",
        "name: a\nmesh: {<<: text}\n", "name: a\nmesh: {<<: [[1], [2]]}\n", "name: a\nmesh: {!!merge x: {pp: 2}}\n",
    )
    # Long and deep.
    yield from (
        "".join(f"k{i}: v\n" for i in range(100_000)), b"name: a\n" * 8_000,
        b"name: a\nx: [" + b"!t 1, " * 10_000 + b"1]\n", b"name: a\n" + b"#cc\n" * 50_000,
        b"name: a\n" + b"\n" * 200_000, b"? " * 100_000, b"- " * 100_000, b"a: " * 60_000,
        b'name: "' + b"\\n" * 100_000 + b'"', b"name: |\n" + b"  x\n" * 50_000, b"name: >\n" + b"  x\n" * 50_000,
        b"name: x\n" + b"  x\n" * 50_000,
        "name: a\nresources:\n  env:\n" + "".join(f"    K{i}: 1\n" for i in range(5_000)),
        b"name: a\npipeline: {layers_per_stage: [" + b"x," * 30_000 + b"1]}\n",
        "".join(f"a{i}: &b{i} 1\n" for i in range(12_000)), f"name: a\n'{'k' * 200_000}': 1\n",
        f"name: a\n{'k' * 900}: 1\n", f"name: {'k' * 200_000}\n", f"name: !{'x' * 20_000} a\n",
        HEAD + "".join(f"key{i}: 1\n" for i in range(1000)),
        f"{HEAD}pipeline: {{layers_per_stage: [{'1,' * 1_000_000}1]}}\n",
    )
    for depth in (100, 1000, 100_000):
        yield from (
            b"name: " + b"[" * depth + b"]" * depth, b"name: " + b"{a: " * depth + b"1" + b"}" * depth,
            b"name: " + b"[" * depth,
        )
    yield b"".join(b" " * i + b"k:\n" for i in range(600))
    # Numbers.
    for key, value in (
        ("mesh", f"{{pp: {_DIGITS}}}"), ("mesh", f"{{pp: -{_DIGITS}}}"), ("mesh", f"{{pp: {'9' * 400}}}"),
        ("mesh", f"{{pp: 0x{'f' * 5000}}}"), ("mesh", f"{{pp: 0o{'7' * 5000}}}"), ("mesh", f"{{pp: '{_DIGITS}'}}"),
        ("train", f"{{clip_norm: {_DIGITS}.5}}"), ("train", f"{{clip_norm: {'9' * 400}}}"),
        ("train", f"{{clip_norm: 1e{_DIGITS}}}"), (f"'[{_DIGITS}]'", "1"),
    ):
        yield f"{HEAD}{key}: {value}\n"
    yield f"%YAML {_DIGITS}.1\n---\nname: a\n"
    for value in (".inf", "-.inf", ".nan", "1e999", "1e308", "-1e308", "1e-320"):
        yield f"{HEAD}pipeline: {{input_weight: {value}, output_weight: {value}}}\n"
        yield f"{HEAD}train: {{optimizer: {{lr: {value}}}}}\n"
    # Tags.
    for tag in (
        "!!python/object:os.system", "!!python/object/apply:os.system [ls]", "!!python/name:os.system",
        "!!binary aGVsbG8=", "!!set {a}", "!!timestamp 2001-01-01", "!!int x", "!!int '5'", "!!float x", "!!float 'e'",
        "!!bool x", "!!null x", "!!map 5", "!!seq {a: 1}", "!!str [1]", "!!merge x", "!<tag:yaml.org,2002:int> 5",
        "!%41 1", "!!int [1]", "!!null [1]", "!!float {a: 1}",
    ):
        yield from (f"{HEAD}mesh: {tag}\n", f"{HEAD}mesh: {{pp: {tag}}}\n", f"{tag}\n")
    # Keys and characters.
    yield from (
        b"? [a, b]\n: 1\n", b"{{a: 1}: 2}\n", b"name: a\n~: 1\n", b"name: a\n'': 1\n", b"name: a\n5: 1\n1.5: 2\n",
        b"name: a\n'mesh.pp': 1\n'mesh[0]': 1\n'[0]': 2\n'.': 1\n'mesh.': 1\n", b"name: a\x00b\n", b'name: "a\\0b"\n',
        b"name: a\x1b[2J\x07\n", b'name: "\\e[2J\\a"\n"\\e[2J": 1\n', b'name: "\\ud800"\n',
        b'name: a\ndata: {path: "\\ud800"}\n', b'name: a\n"\\ud800": 1\n',
        b'name: a\nresources: {env: {"A\\udc80": "\\udfff"}}\n', b'name: "\\U00110000"\n', b'name: "\\UFFFFFFFF"\n',
        "name: a\n".encode("utf-16"), "name: a\n".encode("utf-16-le"), "name: a\n".encode("utf-32"),
        "name: é\n".encode("latin-1"), b"name: a\r\nmesh:\r\n  pp: x\r\n", b"name: a\rmesh:\r  pp: x\r",
        b"\xef\xbb\xbfname: a\ndata: {kind: synthetic}\n", b"name: a\n\xef\xbb\xbfmesh: {pp: 1}\n",
        b"\xef\xbb\xbf\xef\xbb\xbfname: a\n", "name: a\u0085b\u2028c\u2029d\n", b"name: a\n---\nname: b\n",
        b"name: a\n...\ntrash [\n", bytes(range(256)) * 8, b"a: |99\n x", b"%TAG ! x:\n---\n!a b",
        b"%YAML 1.1\n%YAML 1.2\n---\na", b"%YAML 3.0\n---\nname: a",
    )
    yield from (
        b"~", b"text", b"[1]", b"5", b"", b"{", b'"', b"|", b"%", b"@", b"*", b"&", b"!", b"\t", b"?", b"-",
        b"\xef\xbb\xbf", b"---",
    )
    # Names, paths, URLs.
    for name in ("", "A", "-", "a/../b", "a\nb", "a" * 41, "a\u0000b", "é", "..", "a b", "s3://x/y", "'", "a\x1b[0m"):
        yield HEAD.replace("name: a", "name: " + quoted(name))
    long = "x" * 5000
    for path in (
        long, "/" + long, "a/" * 3000, "~nobody-is-called-this/x", "~", "", ".", "/", "a\x00b", "\x00", "[", "[a-",
        "***", "**", "{a,b}", "file:///etc/passwd", "s3://", "s3:///x", "s3://bucket", "://", "http://[::1", "s3://[/x",
        "s3://b\x00/x", "S3://b/x", "s4://b/x", "/dev/zero", "/dev/null", "/proc/self/mem", "a\ud800b",
    ):
        word = quoted(path)
        yield from (
            f"name: a\ndata: {{kind: text, path: {word}}}\n",
            f"name: a\ndata: {{kind: text, path: x, tokenizer: {word}}}\n",
            HEAD.replace("synthetic", "synthetic, eval: {path: " + word + "}"), f"{HEAD}checkpoint: {{url: {word}}}\n",
            f"{HEAD}model: {{from_hf: {word}}}\n", f"{HEAD}pipeline: {{schedule: {quoted(path + '.csv')}}}\n",
        )


def _settings() -> Iterator[str | tuple[str, ...]]:
    yield from (
        ".".join(["a"] * 10_000) + "=1", "mesh." + ".".join(["a"] * 10_000) + "=1",
        "mesh.pp=" + "[" * 5000 + "]" * 5000, f"mesh.pp={_DIGITS}", f"mesh.pp=0x{'f' * 5000}",
        "mesh.pp=\x00", "mesh.\x00=1", "mesh.pp=\x1b[2J", 'name="\\e[2J"',
        "name=\udc80", "\udc80=1", "", "=", "..=1", "k" * 100_000 + "=1", "name=" + "k" * 100_000,
        "mesh.pp=!!python/object:os.system x", "mesh.pp=1\n---\n2", "name=s3://bucket/x", "data.document_len[0]=5",
        "resources.env.A=5",
    )
    yield from (
        ("mesh.pp=1", "mesh.pp.x=2", "name.x=1"), tuple(f"mesh.a{i}=1" for i in range(5000)), ("mesh.pp=1",) * 5000,
        ("mesh={<<: {pp: 2}}", "mesh.<<={pp: 3}"),
    )
    for section in (
        "mesh", "model", "pipeline", "train", "train.optimizer", "model.lora", "recovery.elastic", "data.eval",
        "resources.env", "pipeline.wire", "pipeline.wire.compression", "model.rope",
    ):
        for value in (
            "5", "text", "[1, 2]", "true", "[{a: 1}]", "{1: 2}", "{~: ~}", "{'': {}}", "[]", "{a: {b: {c: 1}}}",
            "1e400", "'\\0'",
        ):
            yield f"{section}={value}"
    for key, *values in (
        ("model.num_layers", 10**4, 10**5, 10**9, 10**18), ("model.hidden_size", 4 * 10**5, 10**6, 10**12, 10**18),
        ("model.num_heads", 10**9, 10**12), ("model.head_dim", 10**9, 10**15), ("model.ffn_size", 10**9, 10**15),
        ("model.vocab_size", 10**9, 10**12), ("mesh.pp", 1024, 10**5, 10**9, 10**18), ("mesh.fsdp", 1024, 10**9),
        ("mesh.dp_replicate", 10**9), ("mesh.cp", 10**9), ("mesh.ep", 10**5, 10**9),
        ("pipeline.microbatches", 10**4, 10**5, 10**6, 10**9), ("pipeline.stages_per_rank", 64, 10**6, 10**9),
        ("pipeline.lookahead", 10**6, 10**9, 10**18), ("pipeline.pad_to_multiple_of", 10**9, 10**18),
        ("pipeline.seq_len_bucket", 10**9, 10**18), ("pipeline.input_weight", 1e6, 1e308, 0.5),
        ("pipeline.output_weight", 1e6, 1e308, 1e-320), ("data.seq_len", 10**9, 10**15, 10**18),
        ("data.num_documents", 10**12, 10**18), ("train.steps", 10**12, 10**18),
        ("train.micro_batch_size", 10**6, 10**12, 10**18), ("train.seed", 2**63, 10**30),
        ("train.clip_norm", 1e308, 1e-320), ("train.lr_schedule.warmup_steps", 10**18, 10**30),
        ("checkpoint.every_steps", 10**18, 10**30), ("checkpoint.keep", 10**18, 10**30),
        ("checkpoint.max_upload_mbps", 1e308), ("recovery.max_restarts", 10**18), ("recovery.hang_timeout_s", 1e308),
        ("recovery.orphan_timeout_s", 1e308), ("resources.cpus_per_rank", 1e308, 1e-320),
        ("resources.spares", 10**9, 10**18), ("model.rope_theta", 1e308, 1e-320), ("model.norm_eps", 1e308),
        ("model.init_std", 1e308),
    ):
        for value in values:
            yield f"{key}={value}"
    yield from (
        ("pipeline.layers_per_stage=[" + ",".join(["3"] * 5000) + "]", "mesh.pp=5000"),
        ("mesh.pp=16", "model.num_layers=32", "mesh.fsdp=64", "mesh.dp_replicate=64"),
        ("mesh.pp=100", "mesh.fsdp=10000", "mesh.dp_replicate=10000", "mesh.cp=10000"),
        ("data.seq_len=1000000000", "model.vocab_size=1000000000"),
        ("model.kind=mixtral", "model.num_experts=1000000000", "mesh.fsdp=8", "mesh.ep=8"),
        ("model.kind=mixtral", "model.experts_per_token=1000000000"), "model.rope={kind: linear, factor: 1e308}",
        "recovery.elastic={min_ranks: 1000000000000, max_ranks: 10, grace_s: 1e308}",
    )
    kinds = (
        "", ":", "a:", ":a", "a:b:c", "a" * 5000, "." * 3000 + ":f", ".a:f", "a..b:f", "\x00:f", "a\x00:f", "os.path:f",
        "é:f", "a/b:f", "a b:f", "sys:f", "__main__:f", "a\nb:f", "builtins:eval", "1:2", "x" * 5000 + ":f",
    )
    for key in ("data.kind", "pipeline.schedule", "train.optimizer.kind", "recovery.policy"):
        for kind in kinds:
            yield f"{key}={quoted(kind)}"


def quoted(text: str) -> str:
    """Returns text as YAML in double quotes."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'
