import importlib.util
from pathlib import Path

import pytest
import torch

import ritz
from ritz import studies
from ritz.studies._evidence import signed, spread

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


def test_claims_are_judged_by_paired_differences():
    clear = torch.tensor([1.0, 1.2, 0.8], dtype=torch.float64)
    noise = torch.tensor([1.0, -1.2, 0.3], dtype=torch.float64)
    assert signed(clear, 1)["verdict"] == "agrees"
    assert signed(clear, 0) == {"verdict": "differs", "why": "higher"}
    assert signed(noise, 0)["verdict"] == "agrees"
    assert signed(noise, -1)["verdict"] == "differs"
    missing = torch.tensor([float("nan"), 1.0, 1.1])
    assert signed(missing, 1)["verdict"] == "differs"


def test_the_spread_leaves_out_runs_that_are_missing():
    values = torch.tensor([1.0, 2.0, float("nan"), 3.0], dtype=torch.float64)
    assert spread(values) == spread(values[values.isfinite()]) == "2.00 ± 0.58"
    assert spread(values[2:3]) == "-"
    assert spread(values[:1]) == "1"
