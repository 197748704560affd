"""What is installed has hashes, and nobody is told to install what is not the project's."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ("build", "torch", "cuda", "node", "store", "dev")


def test_every_pinned_package_has_hashes_and_no_other_version() -> None:
    lists = "\n".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in NAMES)
    entries = re.split(r"\n(?=[^\s#])", lists)
    locked = {_name(entry): entry for entry in entries if "==" in entry}
    assert all("--hash=sha256:" in entry for entry in locked.values())
    pinned = (ROOT / "constraints.txt").read_text().split()
    for pin in pinned:
        assert f"=={pin.partition('==')[2]} " in locked[_name(pin)], pin


def _name(entry: str) -> str:
    return re.sub(r"[._]", "-", re.split(r"[=@ ]", entry)[0]).lower()


def test_compose_has_no_token_of_its_own() -> None:
    assert "RAY_AUTH_TOKEN: ${RAY_AUTH_TOKEN:?" in (ROOT / "cluster" / "compose.yaml").read_text()


def test_the_readme_installs_from_a_clone() -> None:
    assert re.findall(r"pip install '?raypp(?!\[EXTRA\])", (ROOT / "README.md").read_text()) == []
