import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import ritz
from ritz import studies
from ritz.studies._evidence import PLACES, _command, all_of, judge, near, signed, spread

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


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_a_claim_agrees_or_differs_only_if_the_whole_interval_does():
    # The mean is 1 and two standard errors are 0.23.
    values = column(0.8, 1.0, 1.2)
    assert judge(values, 0.7, 1.3)["verdict"] == "agrees"
    assert judge(values, 0.9, 1.3)["verdict"] == "undecided"
    assert judge(values, high=0.7, cause="small data") == {
        "verdict": "differs",
        "why": "small data",
    }
    assert judge(values, 0.7, 1.3, note="a note", cause="small data")["why"] == "a note"
    assert judge(column(float("nan"), 1.0, 1.1), low=0.0)["verdict"] == "undecided"
    assert judge(column(), low=0.0)["verdict"] == "undecided"


def test_values_that_scatter_widely_never_agree_with_a_number():
    # Two runs learned and one did not; 98.88 was published.
    broken, whole = column(98.0, 98.4, 11.4), column(98.7, 98.9, 99.0)
    assert near(broken, 98.88, 0.6)["verdict"] == "undecided"
    assert near(whole, 98.88, 0.6) == {"verdict": "agrees", "why": "tolerance 0.6"}


def test_claims_about_effects_are_judged_by_paired_differences():
    clear, noise = column(1.0, 1.2, 0.8), column(1.0, -1.2, 0.3)
    assert signed(clear, 1)["verdict"] == "agrees"
    assert signed(clear, -1)["verdict"] == "differs"
    assert signed(noise, -1)["verdict"] == "undecided"
    # Zero is possible, and three cannot be.
    assert signed(noise, 1, size=1.0)["verdict"] == "undecided"
    assert signed(noise, 1, size=3.0)["verdict"] == "differs"
    assert signed(-noise, -1, size=-3.0)["verdict"] == "differs"
    assert signed(clear, 1, size=3.0)["verdict"] == "agrees"
    # No effect agrees only if an effect that matters can be ruled out.
    assert signed(clear, 0, margin=0.6)["verdict"] == "differs"
    assert signed(noise, 0, margin=0.6)["verdict"] == "undecided"
    assert signed(noise / 10, 0, margin=0.6)["verdict"] == "agrees"


def test_a_claim_with_parts_differs_if_one_of_them_does():
    yes, no, open_ = ({"verdict": verdict, "why": "same"} for verdict in
                      ("agrees", "differs", "undecided"))  # fmt: skip
    assert all_of(yes, yes) == yes
    assert all_of(yes, open_) == open_
    assert all_of(open_, no, yes) == no
    assert all_of()["verdict"] == "undecided"


def test_one_run_is_compared_by_its_sign_and_says_so():
    assert signed(column(0.5), 1) == {"verdict": "agrees", "why": "one seed"}
    assert signed(column(0.5), -1) == {"verdict": "differs", "why": "one seed"}


PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


def test_every_saved_result_has_a_section_that_names_its_command():
    sections = set(re.findall(r"^### (\S+)$", PAGE, re.MULTILINE))
    assert sections == {path.stem for path in RESULTS}
    assert len(re.findall(r"^`ritz study ", PAGE, re.MULTILINE)) >= len(RESULTS)


def test_links_of_the_claims_lead_to_sections_of_the_page():
    targets = set(re.findall(r"\]\(#([\w-]+)\)", PAGE))
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    assert targets
    assert targets <= {heading.lower().replace(" ", "-") for heading in headings}


def test_the_counts_are_those_of_the_rows():
    total, *rows = (line for line in PAGE.partition("| all ")[2].splitlines() if "|" in line)
    cells = [int(cell) for cell in total.strip("|").split("|")]
    verdicts = [re.sub(r"[*]| \(\d+\)", "", row.split(" | ")[-1]).strip("| ") for row in rows]
    assert cells[0] == sum(cells[1:])
    for name, count in zip(("agrees", "differs", "undecided", "extends"), cells[1:], strict=True):
        assert verdicts.count(name) == count, name


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_cells_of_the_page_are_short(path):
    result = ritz.load(path)
    name = type(result).__module__.rpartition(".")[2]
    for row in studies.find(name).evidence(result):
        cells = (row.where, row.what, row.published, row.measured)
        assert max(map(len, cells)) <= 80, cells


@pytest.mark.parametrize("size", ["smoke", "paper"])
def test_the_command_of_a_result_names_the_nearest_size(size):
    study = studies.find("averaging_dynamics")
    config = dataclasses.replace(study.SIZES[size], seed=7)
    result = study.Result(config=config, names=(), series=torch.zeros(0), ensembles=torch.zeros(0))
    assert _command(result) == f"ritz study averaging_dynamics --size {size} --set seed=7"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_command_of_a_result_has_its_configuration(path):
    result = ritz.load(path)
    _, _, name, *options = _command(result).split()
    values = dict(pairs := list(zip(options[::2], options[1::2], strict=True)))
    settings = [value.partition("=")[::2] for flag, value in pairs if flag == "--set"]

    study = studies.find(name)
    config = studies.configure(studies.sized(study, values.get("--size", "small")), dict(settings))

    # Folders, and whether runs are read, belong to one machine.
    places = {key: getattr(result.config, key) for key in PLACES if hasattr(config, key)}
    assert dataclasses.replace(config, **places) == result.config


def test_the_spread_leaves_out_runs_that_are_missing():
    values = torch.tensor([1.0, 2.0, float("nan"), 3.0], dtype=torch.float64)
    assert spread(values) == spread(values[values.isfinite()]) == "2.00 ± 0.58"
    assert spread(values[2:3]) == "-"
    assert spread(values[:1]) == "1"
