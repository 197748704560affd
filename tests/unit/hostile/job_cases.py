# ruff: noqa: E501 - tables
"""Job files that nobody sane writes: `CASES` of (name, text of the file, overrides)."""

from __future__ import annotations

from collections.abc import Iterator

Case = tuple[str, bytes, tuple[str, ...]]

_HEAD = "name: a\ndata: {kind: synthetic}\n"
_DIGITS = "9" * 5000


def text_cases() -> Iterator[Case]:
    """Yields files that are wrong, large or tricky as YAML."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    yield "bomb-lists", bomb.encode(), ()
    bomb = "a0: &a0 {k0: x, k1: x}\n"
    bomb += "".join(f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}\n" for n in range(1, 12))
    yield "bomb-maps", bomb.encode(), ()
    bomb = "a0: &a0 {x: 1}\n"
    bomb += "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12))
    yield "bomb-merges", bomb.encode(), ()
    yield "bomb-long-text", f"a: &a '{'x' * 60_000}'\nb: [{', '.join(['*a'] * 9000)}]\n".encode(), ()
    yield "bomb-merge-of-wide-map", (
        "a: &a {" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}\n"
        + "".join(f"m{i}: {{<<: *a}}\n" for i in range(3000))
    ).encode(), ()  # fmt: skip
    yield "alias-of-itself", b"name: a\nmesh: &m\n  pp: 1\n  x: *m\n", ()
    yield "alias-of-itself-in-a-list", b"a: &a [1, *a]\n", ()
    yield "merge-of-itself", b"name: a\nmesh: &m\n  pp: 1\n  <<: *m\n", ()
    yield "merge-of-itself-in-a-list", b"name: a\nmesh: &m\n  <<: [*m, *m]\n", ()
    yield "undefined-alias", b"name: *nothing\n", ()
    yield "anchor-twice", b"name: &a a\nmesh: &a {pp: 1}\n", ()
    yield "1-MB-of-keys", b"".join(b"k%d: v\n" % i for i in range(100_000)), ()
    yield "200-KB-of-keys", b"".join(b"k%d: v\n" % i for i in range(20_000)), ()
    yield "200-KB-of-env", b"name: a\nresources:\n  env:\n" + b"".join(b"    K%d: 1\n" % i for i in range(15_000)), ()
    yield "200-KB-of-wrong-layers", b"name: a\npipeline: {layers_per_stage: [" + b"x," * 100_000 + b"1]}\n", ()
    yield "200-KB-of-duplicate-keys", b"name: a\n" * 25_000, ()
    yield "200-KB-of-tags", b"name: a\nx: [" + b"!t 1, " * 30_000 + b"1]\n", ()
    yield "200-KB-of-comment", b"name: a\n" + b"#cc\n" * 50_000, ()
    yield "200-KB-of-blank-lines", b"name: a\n" + b"\n" * 200_000, ()
    yield "200-KB-of-question-marks", b"? " * 100_000, ()
    yield "200-KB-of-dashes", b"- " * 100_000, ()
    yield "200-KB-of-colons", b"a: " * 60_000, ()
    yield "200-KB-of-anchors", b"".join(b"a%d: &b%d 1\n" % (i, i) for i in range(12_000)), ()
    yield "200-KB-in-quotes", b'name: "' + b"\\n" * 100_000 + b'"', ()
    yield "200-KB-in-a-block", b"name: |\n" + b"  x\n" * 50_000, ()
    yield "200-KB-folded", b"name: >\n" + b"  x\n" * 50_000, ()
    yield "200-KB-plain-lines", b"name: x\n" + b"  x\n" * 50_000, ()
    for depth in (100, 1000, 100_000):
        yield f"{depth}-brackets", b"name: " + b"[" * depth + b"]" * depth, ()
        yield f"{depth}-braces", b"name: " + b"{a: " * depth + b"1" + b"}" * depth, ()
        yield f"{depth}-open-brackets", b"name: " + b"[" * depth, ()
    yield "1000-indented", b"".join(b" " * i + b"k:\n" for i in range(600)), ()
    yield "integer-of-5000-digits", f"{_HEAD}mesh: {{pp: {_DIGITS}}}\n".encode(), ()
    yield "negative-of-5000-digits", f"{_HEAD}mesh: {{pp: -{_DIGITS}}}\n".encode(), ()
    yield "integer-of-400-digits", f"{_HEAD}mesh: {{pp: {'9' * 400}}}\n".encode(), ()
    yield "hex-of-5000-digits", f"{_HEAD}mesh: {{pp: 0x{'f' * 5000}}}\n".encode(), ()
    yield "octal-of-5000-digits", f"{_HEAD}mesh: {{pp: 0o{'7' * 5000}}}\n".encode(), ()
    yield "float-of-5000-digits", f"{_HEAD}train: {{clip_norm: {_DIGITS}.5}}\n".encode(), ()
    yield "integer-of-400-digits-for-a-float", f"{_HEAD}train: {{clip_norm: {'9' * 400}}}\n".encode(), ()
    yield "exponent-of-5000-digits", f"{_HEAD}train: {{clip_norm: 1e{_DIGITS}}}\n".encode(), ()
    yield "digits-in-a-key", f"{_HEAD}'[{_DIGITS}]': 1\n".encode(), ()
    yield "digits-in-a-directive", f"%YAML {_DIGITS}.1\n---\nname: a\n".encode(), ()
    yield "quoted-number-of-5000-digits", f"{_HEAD}mesh: {{pp: '{_DIGITS}'}}\n".encode(), ()
    for value in (".inf", "-.inf", ".nan", "1e999", "1e308", "-1e308", "1e-320"):
        yield f"float-{value}", f"{_HEAD}pipeline: {{input_weight: {value}, output_weight: {value}}}\n".encode(), ()
        yield f"lr-{value}", f"{_HEAD}train: {{optimizer: {{lr: {value}}}}}\n".encode(), ()
        yield f"own-{value}", f"name: a\nmodel: {{kind: 'os:path', x: {value}}}\n".encode(), ()
    for tag in ("!!python/object:os.system", "!!python/object/apply:os.system [ls]", "!!python/name:os.system",
                "!!binary aGVsbG8=", "!!set {a}", "!!timestamp 2001-01-01", "!!int x", "!!int '5'", "!!float x",
                "!!float 'e'", "!!bool x", "!!null x", "!!map 5", "!!seq {a: 1}", "!!str [1]", "!!merge x",
                "!<tag:yaml.org,2002:int> 5", "!%41 1", "!!int [1]", "!!null [1]", "!!float {a: 1}"):  # fmt: skip
        yield f"tag {tag}", f"{_HEAD}mesh: {tag}\n".encode(), ()
        yield f"tag {tag} below", f"{_HEAD}mesh: {{pp: {tag}}}\n".encode(), ()
        yield f"tag {tag} as the file", f"{tag}\n".encode(), ()
    yield "tag-of-20000", f"name: !{'x' * 20_000} a\n".encode(), ()
    yield "key-of-200-KB", f"name: a\n'{'k' * 200_000}': 1\n".encode(), ()
    yield "key-of-900", f"name: a\n{'k' * 900}: 1\n".encode(), ()
    yield "text-of-200-KB", f"name: {'k' * 200_000}\n".encode(), ()
    yield "list-as-key", b"? [a, b]\n: 1\n", ()
    yield "map-as-key", b"{{a: 1}: 2}\n", ()
    yield "null-key", b"name: a\n~: 1\n", ()
    yield "empty-key", b"name: a\n'': 1\n", ()
    yield "number-key", b"name: a\n5: 1\n1.5: 2\n", ()
    yield "merge-as-value", b"name: <<\n", ()
    yield "merge-of-text", b"name: a\nmesh: {<<: text}\n", ()
    yield "merge-of-lists", b"name: a\nmesh: {<<: [[1], [2]]}\n", ()
    yield "merge-key-with-tag", b"name: a\nmesh: {!!merge x: {pp: 2}}\n", ()
    yield "keys-that-look-like-paths", b"name: a\n'mesh.pp': 1\n'mesh[0]': 1\n'[0]': 2\n'.': 1\n'mesh.': 1\n", ()
    yield "nul", b"name: a\x00b\n", ()
    yield "nul-in-quotes", b'name: "a\\0b"\n', ()
    yield "control-characters", b"name: a\x1b[2J\x07\n", ()
    yield "control-in-quotes", b'name: "\\e[2J\\a"\n"\\e[2J": 1\n', ()
    yield "surrogate", b'name: "\\ud800"\n', ()
    yield "surrogate-in-a-path", b'name: a\ndata: {path: "\\ud800"}\n', ()
    yield "surrogate-in-a-key", b'name: a\n"\\ud800": 1\n', ()
    yield "surrogate-in-env", b'name: a\nresources: {env: {"A\\udc80": "\\udfff"}}\n', ()
    yield "escape-beyond-unicode", b'name: "\\U00110000"\n', ()
    yield "escape-far-beyond-unicode", b'name: "\\UFFFFFFFF"\n', ()
    yield "utf-16", "name: a\n".encode("utf-16"), ()
    yield "utf-16-without-bom", "name: a\n".encode("utf-16-le"), ()
    yield "utf-32", "name: a\n".encode("utf-32"), ()
    yield "latin-1", "name: é\n".encode("latin-1"), ()
    yield "crlf", b"name: a\r\nmesh:\r\n  pp: x\r\n", ()
    yield "cr", b"name: a\rmesh:\r  pp: x\r", ()
    yield "bom", b"\xef\xbb\xbfname: a\ndata: {kind: synthetic}\n", ()
    yield "bom-inside", b"name: a\n\xef\xbb\xbfmesh: {pp: 1}\n", ()
    yield "bom-twice", b"\xef\xbb\xbf\xef\xbb\xbfname: a\n", ()
    yield "next-line-and-separators", "name: a\u0085b\u2028c\u2029d\n".encode(), ()
    yield "two-documents", b"name: a\n---\nname: b\n", ()
    yield "end-marker", b"name: a\n...\ntrash [\n", ()
    for name, top in (("null", b"~"), ("text", b"text"), ("list", b"[1]"), ("number", b"5"), ("empty", b""),
                      ("binary", bytes(range(256)) * 8), ("brace", b"{"), ("quote", b'"'), ("bar", b"|"),
                      ("percent", b"%"), ("at", b"@"), ("star", b"*"), ("amp", b"&"), ("bang", b"!"), ("tab", b"\t"),
                      ("question", b"?"), ("dash", b"-"), ("only-bom", b"\xef\xbb\xbf"), ("doc", b"---"),
                      ("block-99", b"a: |99\n x"), ("directive", b"%TAG ! x:\n---\n!a b"), ("two-yaml", b"%YAML 1.1\n%YAML 1.2\n---\na"),
                      ("yaml-3", b"%YAML 3.0\n---\nname: a")):  # fmt: skip
        yield f"file-{name}", top, ()
    yield "1000-problems", (_HEAD + "".join(f"key{i}: 1\n" for i in range(1000))).encode(), ()
    for section in ("mesh", "model", "pipeline", "train", "train.optimizer", "model.lora", "recovery.elastic",
                    "data.eval", "resources.env", "pipeline.wire", "pipeline.wire.compression", "model.rope"):  # fmt: skip
        for number, value in enumerate(("5", "text", "[1, 2]", "true", "[{a: 1}]", "{1: 2}", "{~: ~}", "{'': {}}", "[]",
                                        "{a: {b: {c: 1}}}", "1e400", "'\\0'")):  # fmt: skip
            yield f"{section}-is-{number}", _HEAD.encode(), (f"{section}={value}",)


def override_cases() -> Iterator[Case]:
    """Yields `--set` of every such kind."""
    head = _HEAD.encode()
    yield "set-path-of-10000", head, (".".join(["a"] * 10_000) + "=1",)
    yield "set-path-of-10000-in-mesh", head, ("mesh." + ".".join(["a"] * 10_000) + "=1",)
    yield "set-brackets", head, ("mesh.pp=" + "[" * 5000 + "]" * 5000,)
    yield "set-digits", head, (f"mesh.pp={_DIGITS}",)
    yield "set-hex-digits", head, (f"mesh.pp=0x{'f' * 5000}",)
    yield "set-bomb", head, ("mesh={" + "a0: &a0 [x,x,x,x,x,x,x,x,x,x], " + ", ".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)) + "}",)  # fmt: skip
    yield "set-nul", head, ("mesh.pp=\x00",)
    yield "set-nul-in-a-key", head, ("mesh.\x00=1",)
    yield "set-control", head, ("mesh.pp=\x1b[2J",)
    yield "set-control-in-quotes", head, ('name="\\e[2J"',)
    yield "set-surrogate", head, ("name=\udc80",)
    yield "set-surrogate-key", head, ("\udc80=1",)
    yield "set-nothing", head, ("",)
    yield "set-equals", head, ("=",)
    yield "set-dots", head, ("..=1",)
    yield "set-long-key", head, ("k" * 100_000 + "=1",)
    yield "set-long-value", head, ("name=" + "k" * 100_000,)
    yield "set-tag", head, ("mesh.pp=!!python/object:os.system x",)
    yield "set-two-documents", head, ("mesh.pp=1\n---\n2",)
    yield "set-below-a-value", head, ("mesh.pp=1", "mesh.pp.x=2", "name.x=1")
    yield "set-5000-times", head, tuple(f"mesh.a{i}=1" for i in range(5000))
    yield "set-5000-times-the-same", head, ("mesh.pp=1",) * 5000
    yield "set-merge", head, ("mesh={<<: {pp: 2}}", "mesh.<<={pp: 3}")
    yield "set-name-of-a-url", head, ("name=s3://bucket/x",)
    yield "set-index", head, ("data.document_len[0]=5",)
    yield "set-in-an-empty-file", b"", ("name=a", "data.kind=synthetic")
    yield "set-env", head, ("resources.env.A=5",)


def number_cases() -> Iterator[Case]:
    """Yields numbers that look valid and are far too large, or large enough to take long."""
    head = _HEAD.encode()
    for key, *values in (
        ("model.num_layers", 4096, 10**4, 10**5, 10**9, 10**18),
        ("model.hidden_size", 4 * 10**5, 10**6, 10**12, 10**18),
        ("model.num_heads", 10**9, 10**12),
        ("model.head_dim", 10**9, 10**15),
        ("model.ffn_size", 10**9, 10**15),
        ("model.vocab_size", 10**9, 10**12),
        ("mesh.pp", 1024, 10**5, 10**9, 10**18),
        ("mesh.fsdp", 1024, 10**5, 10**9),
        ("mesh.dp_replicate", 10**5, 10**9),
        ("mesh.cp", 10**5, 10**9),
        ("mesh.ep", 10**5, 10**9),
        ("pipeline.microbatches", 10**4, 10**5, 10**6, 10**9),
        ("pipeline.stages_per_rank", 64, 10**6, 10**9),
        ("pipeline.lookahead", 10**6, 10**9, 10**18),
        ("pipeline.pad_to_multiple_of", 10**9, 10**18),
        ("pipeline.seq_len_bucket", 10**9, 10**18),
        ("pipeline.input_weight", 1e6, 1e308, 0.5),
        ("pipeline.output_weight", 1e6, 1e308, 1e-320),
        ("data.seq_len", 10**9, 10**15, 10**18),
        ("data.num_documents", 10**12, 10**18),
        ("train.steps", 10**12, 10**18),
        ("train.micro_batch_size", 10**6, 10**12, 10**18),
        ("train.seed", 2**63, 10**30),
        ("train.clip_norm", 1e308, 1e-320),
        ("train.lr_schedule.warmup_steps", 10**18, 10**30),
        ("checkpoint.every_steps", 10**18, 10**30),
        ("checkpoint.keep", 10**18, 10**30),
        ("checkpoint.max_upload_mbps", 1e308),
        ("recovery.max_restarts", 10**18),
        ("recovery.hang_timeout_s", 1e308),
        ("recovery.orphan_timeout_s", 1e308),
        ("resources.cpus_per_rank", 1e308, 1e-320),
        ("resources.spares", 10**9, 10**18),
        ("model.rope_theta", 1e308, 1e-320),
        ("model.norm_eps", 1e308),
        ("model.init_std", 1e308),
    ):
        for value in values:
            yield f"{key}={value:g}", head, (f"{key}={value}",)
    deep = "model.num_layers=4096"
    yield "layers-1000-pp-100", head, ("model.num_layers=1000", "mesh.pp=100", "pipeline.microbatches=100")
    yield "layers-4096-pp-100", head, (deep, "mesh.pp=100", "pipeline.microbatches=100")
    yield "layers-4096-pp-1000", head, (deep, "mesh.pp=1000", "pipeline.microbatches=1000")
    yield "layers-4096-pp-1024", head, (deep, "mesh.pp=1024", "pipeline.microbatches=10")
    yield "layers-4096-too-many-stages", head, (deep, "mesh.pp=4097", "pipeline.microbatches=10")
    yield (
        "layers-4096-own-weights",
        head,
        (deep, "mesh.pp=10000", "pipeline.input_weight=0.5", "pipeline.output_weight=0.5"),
    )
    yield (
        "layers-4096-whole-weights",
        head,
        (deep, "mesh.pp=5000", "pipeline.input_weight=9", "pipeline.output_weight=9"),
    )
    yield "layers-200-pp-200", head, ("model.num_layers=200", "mesh.pp=200", "pipeline.microbatches=200")
    for schedule in ("gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"):
        stages = "1" if schedule == "gpipe" else "2"
        sizes = ("model.num_layers=512", "mesh.pp=128", "pipeline.microbatches=512")
        yield f"large-{schedule}", head, (f"pipeline.schedule={schedule}", f"pipeline.stages_per_rank={stages}", *sizes)
        sizes = (deep, "mesh.pp=1024", "pipeline.microbatches=4096")
        yield (
            f"larger-{schedule}",
            head,
            (f"pipeline.schedule={schedule}", f"pipeline.stages_per_rank={stages}", *sizes),
        )
    yield (
        "layers-per-stage-of-10000",
        head,
        (f"pipeline.layers_per_stage=[{','.join(['1'] * 10_000)}]", deep, "mesh.pp=10000"),
    )
    yield (
        "layers-per-stage-of-1000000",
        _HEAD.encode() + b"pipeline: {layers_per_stage: [" + b"1," * 1_000_000 + b"1]}\n",
        (),
    )
    yield (
        "layers-per-stage-of-5000-wrong",
        head,
        (f"pipeline.layers_per_stage=[{','.join(['3'] * 5000)}]", "mesh.pp=5000"),
    )
    yield "a-rank-per-place", head, ("mesh.pp=16", "model.num_layers=32", "mesh.fsdp=64", "mesh.dp_replicate=64")
    yield (
        "100000-ranks",
        head,
        ("mesh.pp=25", "model.num_layers=50", "mesh.fsdp=40", "mesh.dp_replicate=100", "pipeline.microbatches=32"),
    )
    yield "100000-ranks-cp-ep", head, ("mesh.pp=25", "model.num_layers=50", "mesh.fsdp=100", "mesh.cp=40", "model.kind=mixtral", "mesh.ep=8", "pipeline.microbatches=32")  # fmt: skip
    yield "100000-ranks-wide", head, ("mesh.fsdp=100000",)
    yield "product-of-a-mesh", head, ("mesh.pp=100", "mesh.fsdp=10000", "mesh.dp_replicate=10000", "mesh.cp=10000")
    experts = ("model.kind=mixtral", deep, "mesh.pp=4", "mesh.fsdp=8", "mesh.ep=8")
    yield "experts-4096-layers", head, experts
    yield (
        "experts-mlp-only",
        head,
        ("model.kind=qwen3_moe", deep, f"model.mlp_only_layers=[{','.join(map(str, range(4096)))}]"),
    )
    yield "long-rows-of-many-ids", head, ("data.seq_len=1000000000", "model.vocab_size=1000000000")
    yield "experts-1e9", head, ("model.kind=mixtral", "model.num_experts=1000000000", "mesh.fsdp=8", "mesh.ep=8")
    yield "experts-per-token-1e9", head, ("model.kind=mixtral", "model.experts_per_token=1000000000")
    yield "lora-4096-layers", head, (deep, "model.lora={rank: 1000000000}", "mesh.pp=8")
    yield "lora-targets", head, (deep, f"model.lora={{targets: [{','.join(f't{i}' for i in range(1000))}]}}")
    yield "window-layers", head, ("model.kind=gemma2", deep, "model.sliding_window=1000000000")
    yield "rope", head, ("model.rope={kind: linear, factor: 1e308}",)
    yield "elastic", head, ("recovery.elastic={min_ranks: 1000000000000, max_ranks: 10, grace_s: 1e308}",)
    yield "offload-4096-layers", head, (deep, "train.optimizer.offload=true", "mesh.pp=64", "pipeline.microbatches=128")


def name_cases() -> Iterator[Case]:
    """Yields names, paths and URLs."""
    head = _HEAD.encode()
    long = "x" * 5000
    for number, name in enumerate(
        ("", "A", "-", "a/../b", "a\nb", "a" * 41, "a\u0000b", "é", "..", "a b", "s3://x/y", "'", "a\x1b[0m")
    ):
        yield f"name-{number}", _HEAD.replace("name: a", "name: " + _quoted(name)).encode(), ()
    paths = (long, "/" + long, "a/" * 3000, "~nobody-is-called-this/x", "~", "", ".", "/", "a\x00b", "\x00", "[", "[a-",
             "***", "**", "{a,b}", "file:///etc/passwd", "s3://", "s3:///x", "s3://bucket", "://", "http://[::1", "s3://[/x",
             "s3://b\x00/x", "S3://b/x", "s4://b/x", "/dev/zero", "/dev/null", "/proc/self/mem", "a\ud800b")  # fmt: skip
    for number, path in enumerate(paths):
        word = _quoted(path)
        yield f"data.path-{number}", f"name: a\ndata: {{kind: text, path: {word}}}\n".encode(), ()
        yield f"data.tokenizer-{number}", f"name: a\ndata: {{kind: text, path: x, tokenizer: {word}}}\n".encode(), ()
        yield (
            f"data.eval-{number}",
            f"{_HEAD.replace('synthetic', 'synthetic, eval: {path: ' + word + '}')}".encode(),
            (),
        )
        yield f"checkpoint.url-{number}", f"{_HEAD}checkpoint: {{url: {word}}}\n".encode(), ()
        yield f"from_hf-{number}", f"{_HEAD}model: {{from_hf: {word}}}\n".encode(), ()
        yield f"schedule-{number}", f"{_HEAD}pipeline: {{schedule: {_quoted(path + '.csv')}}}\n".encode(), ()
    kinds = ("", ":", "a:", ":a", "a:b:c", "a" * 5000, "." * 3000 + ":f", ".a:f", "a..b:f", "\x00:f", "a\x00:f", "os.path:f",
             "é:f", "a/b:f", "a b:f", "sys:f", "__main__:f", "a\nb:f", "builtins:eval", "1:2", "x" * 5000 + ":f")  # fmt: skip
    for key in ("model.kind", "data.kind", "pipeline.schedule", "train.optimizer.kind", "recovery.policy"):
        for number, kind in enumerate(kinds):
            yield f"{key}-{number}", head, (f"{key}={_quoted(kind)}",)


def cases() -> Iterator[Case]:
    yield from text_cases()
    yield from override_cases()
    yield from number_cases()
    yield from name_cases()


def _quoted(text: str) -> str:
    """Returns text as YAML in double quotes."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'
