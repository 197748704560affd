"""What raypp never does with what others give it, and what it never writes down."""

import ast
import contextlib
import errno
import json
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import raypp
from raypp.control import credentials
from raypp.errors import JobError, RayppError
from raypp.job.document import read_document
from raypp.job.job_file import apply_overrides
from raypp.job.load import job_document, parse_job
from raypp.job.secret import is_mark, is_secret, secrets_of, without_secrets
from raypp.job.trackers import environment_of
from raypp.state.checkpoint.layout import check_run
from raypp.state.checkpoint.run_spec import read_spec, write_spec
from raypp.storage import open_store
from raypp.storage.directory import DirectoryStore
from raypp.user_folder import write_private

_ROOT = Path(raypp.__file__).parent
_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
# Torch's collectives of objects pickle what they carry.
_CALLS = {
    "eval", "exec", "compile", "os.system", "os.popen", "torch.load", "torch.save", "yaml.load", "yaml.load_all",
    "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "dist.all_gather_object", "dist.broadcast_object_list",
    "dist.gather_object", "dist.scatter_object_list", "dist.send_object_list", "dist.recv_object_list",
}  # fmt: skip


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _offences(path: Path) -> Iterator[str]:
    file = path.relative_to(_ROOT)
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            continue
        place = f"{file}:{node.lineno}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + ([node.module] if isinstance(node, ast.ImportFrom) else [])
            yield from (f"{place} imports {name}" for name in names if name and name.split(".")[0] in _MODULES)
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            given = {one.arg: ast.unparse(one.value) for one in node.keywords if one.arg in ("shell", "allow_pickle")}
            if name in _CALLS:
                yield f"{place} calls {name}"
            if given.get("shell", "False") != "False":
                yield f"{place} gives a command to a shell"
            if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
                yield f"{place} lets numpy unpickle"


def test_nothing_from_a_bucket_or_a_peer_is_unpickled_and_no_shell_sees_a_name() -> None:
    assert [offence for path in sorted(_ROOT.rglob("*.py")) for offence in _offences(path)] == []


def test_the_search_for_offences_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_ROOT", tmp_path)
    path = tmp_path / "bad.py"
    lines = ("import pickle", "torch.load(x)", "run(c, shell=True)", "np.load(f, allow_pickle=True)", "eval('1')")
    path.write_text("\n".join(lines))
    assert len(list(_offences(path))) == 5


# Names
# ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.one_of(st.text(max_size=50), st.from_regex(r"[a-z0-9-]{0,45}")))
@example("fine\n")
@example("../up")
@example("a;id")
@example("$(id)")
def test_a_run_name_that_is_accepted_is_safe_in_a_path_a_key_and_a_command(name: str) -> None:
    try:
        check_run(name)
    except RayppError:
        with pytest.raises(JobError):
            parse_job({"name": name})
        return
    assert parse_job({"name": name}).name == name
    assert shlex.quote(name) == name and name == Path(name).name and name not in ("", ".", "..")
    assert shlex.split(f"driver stop {name}")[-1] == name


@settings(deadline=None, max_examples=50)
@given(st.text(min_size=1, max_size=30))
@example("../../etc/passwd")
@example("a/../../b")
@example("/etc/passwd")
@example("a\x00b")
def test_no_key_leads_out_of_a_directory_store(key: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / "store"
        store = DirectoryStore(inner)
        with contextlib.suppress(RayppError, ValueError, UnicodeError, OSError):
            store.put(key, b"x")
        assert [path.name for path in Path(folder).iterdir()] in ([], ["store"])


@settings(deadline=None)
@given(st.text(max_size=60))
@example("s3://bucket/../other")
@example("s3://user:password@bucket/x")
@example("file:///etc")
def test_a_store_url_is_a_store_or_an_error_for_people(url: str) -> None:
    if "://" not in url:  # a directory of any name is the user's own choice
        return
    try:
        open_store(url)
    except RayppError as error:
        assert error.problems


@settings(deadline=None)
@given(st.text(max_size=60))
@example("a.b=!!python/object/apply:os.system ['id']")
@example("name=$(id)")
@example("train.steps=__import__('os')")
def test_a_setting_is_data_or_an_error_for_people(setting: str) -> None:
    document = read_document("name: fine\n", "job.yaml")
    apply_overrides(document, [setting])
    json.dumps(document.value, default=str)
    assert all(problem.fault for problem in document.problems)


# Secrets
# --------------------------------------------------------------------------------------------

SECRETS = {
    "WANDB_API_KEY": "value-of-wandb", "DB_PASSWORD": "value-of-db", "MY_TOKEN": "value-of-token",
    "https_proxy": "http://me:value-of-proxy@proxy:3128", "SIGNING_KEY": "value-of-signing",
    "SMTP_PW": "value-of-mail", "MYPASS": "value-of-pass", "SSH_KEYFILE_CONTENT": "value-of-ssh",
    "NETRC": "value-of-netrc", "SLACK_HOOK": "https://hooks.example/value-of-hook",
    "NCCL_CONF_FILE": "https://b.example/c?sig=value-of-signature",
}  # fmt: skip
UNKNOWN = {"MONKEY": "value-of-monkey", "http_proxy": "http://value-of-host:3128"}
PLAIN = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false"}


def test_secrets_are_recognised_among_settings() -> None:
    assert all(is_secret(*item) for item in SECRETS.items())
    assert not any(is_secret(*item) for item in (UNKNOWN | {"NCCL_DEBUG": "INFO"}).items())


def test_a_value_of_the_environment_is_shown_only_if_its_name_is_on_a_list(tmp_path: Path) -> None:
    env = SECRETS | UNKNOWN | PLAIN | {"LISTED_PW": "banana"}
    job = parse_job({"name": "run", "resources": {"env": env, "shown_env": ["LISTED_PW"]}})
    assert secrets_of(job) == SECRETS | UNKNOWN
    store = open_store(str(tmp_path / "store"))
    write_spec(store, "run", job_document(job))
    write_spec(store, "run", job_document(job), 2)
    written = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert b"value-of" not in written and b"eth0" in written and b"banana" in written
    again = parse_job(read_spec(store, "run"))
    assert {name for name, value in again.resources.env.items() if is_mark(value)} == {*SECRETS, *UNKNOWN}
    assert without_secrets(job_document(again)) == job_document(again)
    assert secrets_of(again) == {} and environment_of(again) == PLAIN | {"LISTED_PW": "banana"}


def test_a_digest_shows_whether_a_value_is_the_same_in_the_same_run_only() -> None:
    def mark(run: str, name: str, value: str) -> str:
        return str(without_secrets({"name": run, "resources": {"env": {name: value}}})["resources"]["env"][name])

    assert mark("run", "A", "x") == mark("run", "A", "x")
    assert len({mark("run", "A", "x"), mark("run", "A", "y"), mark("run", "B", "x"), mark("other", "A", "x")}) == 4


def test_private_values_are_scrubbed_from_texts_unless_they_are_ordinary_words(monkeypatch: pytest.MonkeyPatch) -> None:
    private = {"A_SECRET": "value-1 of it", "MODE": "training", "DIR": "/data/x"}
    for name in private:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(credentials, "_values", set())
    credentials.take(private)
    assert os.environ["A_SECRET"] == "value-1 of it"
    assert credentials.scrubbed("training on /data/x: GET value-1 of it") == "training on /data/x: GET ***"


def test_files_of_the_home_are_private(tmp_path: Path) -> None:
    write_private(tmp_path / "home" / "token", "x")
    assert stat.S_IMODE((tmp_path / "home" / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_an_error_of_a_full_disk_below_the_home_names_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(JobError, match=r"RAYPP_HOME: cannot write .*/token: No space left") as caught:
        write_private(tmp_path / "token", "secret")
    assert "free some space" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
