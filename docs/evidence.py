"""Write the tables of evidence.md from the results of the studies: ``python docs/evidence.py``."""

from pathlib import Path

from ritz import studies

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "benchmarks" / "results" / "studies"
MARKER = "<!-- Everything below is written by docs/evidence.py. -->\n"


def page():
    """Return the page: its hand-written beginning, and the tables."""
    begin = (FOLDER / "evidence.md").read_text(encoding="utf-8").partition(MARKER)[0]
    return begin + MARKER + "\n" + studies.evidence(RESULTS)


if __name__ == "__main__":
    (FOLDER / "evidence.md").write_text(page(), encoding="utf-8")
