"""The pages of the documentation: links, the index, and the reference of public names."""

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


def test_the_reference_is_made_from_the_docstrings():
    spec = importlib.util.spec_from_file_location("api_pages", DOCS / "api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stored = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "api").iterdir()}
    assert module.pages() == stored, "run `make api` after a change of public names or docstrings"


def test_every_entry_of_the_reference_says_what_it_is():
    for page in (DOCS / "api").iterdir():
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"^- `[^`]*`:\s*$|^\s*\[source\]", text, flags=re.MULTILINE), (
            page.name
        )
