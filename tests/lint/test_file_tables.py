"""Every package has a page with the table of its files, and every file says what it is for."""

import ast
import re
import tomllib
from pathlib import Path

from markdown_pages import REPOSITORY, prose

PACKAGES = sorted(path.parent.name for path in (REPOSITORY / "raypp").glob("*/__init__.py"))
ROW = re.compile(r"\| `([\w/]+\.py)` \| (.+) \|")


def table_of(page: Path) -> dict[str, str]:
    """Returns file -> purpose of tables headed `file`; a file named twice fails."""
    rows: dict[str, str] = {}
    within = False
    for line in prose(page):
        if not line.text.startswith("|"):
            within = False
        elif line.text.startswith("| file |"):
            within = True
        elif within and not line.text.startswith("|---"):
            row = ROW.fullmatch(line.text)
            assert row, f"{page}:{line.number} is no row of one file and its purpose"
            assert row[1] not in rows, f"{page}:{line.number} {row[1]} has two rows"
            rows[row[1]] = row[2].strip()
    return rows


def test_the_page_of_a_package_has_a_place_for_the_table_of_its_files() -> None:
    pages = {package: (REPOSITORY / "docs" / f"{package}.md").read_text(encoding="utf-8") for package in PACKAGES}
    assert [package for package, text in pages.items() if text.count("\n<!-- files -->\n") != 1] == []
    inside = {path.parent.name for path in (REPOSITORY / "raypp").glob("*/**/__init__.py")}
    marked = {path.stem for path in (REPOSITORY / "docs").glob("*.md") if "\n<!-- files -->\n" in path.read_text()}
    assert marked <= inside


def test_every_file_says_what_it_is_for() -> None:
    paths = [path for path in (REPOSITORY / "raypp").rglob("*.py") if not path.name.startswith("__")]
    about = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in paths}
    assert [str(path) for path, text in about.items() if not text] == []


def test_the_page_on_architecture_lists_the_packages_and_the_files_that_stand_alone() -> None:
    page = Path("docs/architecture.md")
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    rooms = re.findall(r"^(?:\| )?\[`(\w+)/`\]\((\w+)\.md\)", text, re.M)
    assert sorted(rooms) == [(package, package) for package in PACKAGES]
    alone = [path.name for path in (REPOSITORY / "raypp").glob("*.py") if not path.name.startswith("__")]
    assert sorted(table_of(page)) == sorted(alone)


def test_the_road_of_the_page_on_architecture_leads_through_code_that_is_there() -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    road = re.findall(r"`(\w+/[\w/]+\.py):([\w.]+)`", text)
    assert len(road) > 20
    for place, name in road:
        body: list[ast.stmt] = ast.parse((REPOSITORY / "raypp" / place).read_text(encoding="utf-8")).body
        for part in name.split("."):
            found = [one for one in body if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == part]
            assert len(found) == 1, f"{place} has no {name}"
            body = found[0].body


def test_every_package_and_file_has_a_layer_and_the_page_shows_the_layers() -> None:
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["type"] == "layers")
    layers = [layer.replace("raypp.", "") for layer in layers]
    modules = [path.stem for path in (REPOSITORY / "raypp").glob("*.py") if not path.name.startswith("__")]
    listed = [name for layer in layers for name in layer.split(" | ")]
    assert sorted(listed) == sorted([*modules, *PACKAGES])
    page = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    assert "```\n" + "\n".join(layers) + "\n```" in page


def test_the_index_of_decisions_lists_them_all_by_their_titles_in_order() -> None:
    decisions = REPOSITORY / "docs/design"
    text = (decisions / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(.+)\]\((\d{4}-[\w-]+\.md)\)$", text, re.M)
    titles = {path.name: path.read_text(encoding="utf-8").splitlines()[0] for path in decisions.glob("[0-9]*.md")}
    assert [(name, f"# {title}") for title, name in listed] == sorted(titles.items())
