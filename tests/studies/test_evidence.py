import importlib.util
from pathlib import Path

import pytest

import ritz
from ritz import studies

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results" / "studies").glob("*.safetensors"))


def test_the_page_of_evidence_is_made_from_the_stored_results():
    place = ROOT / "docs" / "evidence.py"
    spec = importlib.util.spec_from_file_location("evidence_page", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    text = module.page()

    assert text == (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8"), (
        "run `make evidence` after a change of results or of a study"
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_results_can_be_read_and_printed(path):
    result = ritz.load(path)
    assert str(result)
    study = studies.find(type(result).__module__.rpartition(".")[2])
    assert study.evidence(result)
