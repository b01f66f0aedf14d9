"""The pages of the documentation: links, the index, and the pages made from the docstrings."""

import importlib.util
import re
from pathlib import Path

import pytest

import ritz

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]


def without_code(page):
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`\n]*`", "`", text)


def anchors(page):
    """Return the anchors that a Markdown viewer makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_to_a_file_and_a_heading(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def test_the_index_lists_every_page():
    index = DOCS / "README.md"
    links = re.findall(r"\]\(([^)\s#]+)\)", index.read_text(encoding="utf-8"))
    listed = {(DOCS / link).resolve() for link in links}
    assert {page for page in DOCS.glob("*.md") if page != index} <= listed


def test_every_picture_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path.name for path in (DOCS / "images").iterdir() if path.name not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_ritz_on_a_page_exist(page):
    for name in re.findall(r"`(ritz(?:\.[a-zA-Z_]\w*)+)", page.read_text(encoding="utf-8")):
        value = ritz
        for part in name.split(".")[1:]:
            value = getattr(value, part)


def test_the_reference_and_the_list_of_modules_are_made_from_the_docstrings():
    spec = importlib.util.spec_from_file_location("api_pages", DOCS / "api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    paths = [DOCS / "modules.md", *(DOCS / "api").iterdir()]
    stored = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    assert module.pages() == stored, "run `make api` after a change of names or docstrings"


def test_every_entry_of_the_reference_says_what_it_is():
    for page in (DOCS / "api").iterdir():
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"^- `[^`]*`:\s*$|^\s*\[source\]", text, flags=re.MULTILINE), (
            page.name
        )


def test_every_module_is_described_in_a_short_line_that_has_more_than_names():
    source = ROOT / "src" / "ritz"
    text = (DOCS / "modules.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^- \[`(.*?)`\]\(\S*\): (.*)$", text, flags=re.MULTILINE))
    packages = re.findall(r"^## (\w+)$", text, flags=re.MULTILINE)[1:]

    listed = {*lines, *(f"{package}/__init__.py" for package in packages)}
    assert listed == {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    for module, line in lines.items():
        assert len(line) <= 100, module
        assert line.endswith("."), module
        assert len(re.sub(r"`[^`]*`", "", line).split()) >= 4, module
