import json
import shutil

import pytest
import torch
from cli.own import OWN, ritz, stopping_after

import ritz as library
from ritz.training import read_weights

FEW = ["--steps", "6"]


def test_a_run_folder_is_enough_to_compute_a_spectrum(here, finished, capsys, tmp_path):
    assert ritz("spectrum", "run", *OWN, *FEW, "--matrix", "both", "--batch-norm", "both",
                "--out", tmp_path) == 0  # fmt: skip
    out, err = capsys.readouterr()
    for title in ("Hessian, batch norm eval", "Gauss-Newton, batch norm train"):
        assert title in out
    assert "Lanczos" in err
    files = {f"spectrum-{kind}-{mode}-steps6.safetensors" for kind in ("hessian", "ggn")
             for mode in ("eval", "train")}  # fmt: skip
    # Nothing is left behind of what a resumption would have needed.
    assert {path.name for path in tmp_path.iterdir()} == files | {
        "spectrum-hessian-ggn-eval-train-steps6.png"
    }


def test_the_spectrum_equals_that_of_the_library(here, finished, tmp_path, capsys):
    from ritz.cli._factories import make_data, make_model

    options = ["--matrix", "ggn", "--precision", "float64", "--average", "--steps", "30"]
    assert ritz("spectrum", "run", *OWN, *options, "--json", "--out", tmp_path) == 0
    found = library.load(tmp_path / "spectrum-ggn-eval-average-steps30-float64.safetensors")
    parts = make_data("own_data:load", data_dir=None, options={})
    model = make_model("own_model:net", parts, {})
    model.load_state_dict(read_weights(finished / "average.safetensors"))
    risk = library.Risk(model, torch.nn.functional.cross_entropy, parts.train, precision="float64")
    exact = torch.linalg.eigvalsh(library.ggn(risk).dense())
    # 30 steps of 51 parameters find the largest to roundoff.
    torch.testing.assert_close(found.values[-1], exact[-1], rtol=1e-9, atol=0.0)


def test_json_has_values_and_files(here, finished, tmp_path, capsys):
    assert ritz("spectrum", "run", *OWN, *FEW, "--samples", "20", "--json", "--out", tmp_path) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    (spectrum,) = found["result"].values()
    assert len(spectrum["values"]) == 6
    assert "20 samples" in spectrum["operator"]


def test_an_interrupted_computation_resumes_bit_for_bit(here, finished, tmp_path, monkeypatch):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    arguments = [
        "spectrum",
        "run",
        *OWN,
        "--json",
        "--steps",
        "12",
        "--save-interval",
        "0",
        "--out",
    ]
    assert ritz(*arguments, whole) == 0
    with stopping_after(7, "ritz.spectra.lanczos", monkeypatch):
        assert ritz(*arguments, torn) == 1
    assert list(torn.glob(".*.state*"))
    assert ritz(*arguments, torn) == 0
    name = "spectrum-hessian-eval-steps12.safetensors"
    assert (torn / name).read_bytes() == (whole / name).read_bytes()
    assert not list(torn.glob(".*"))


def test_a_saved_state_of_other_samples_is_not_used(here, finished, tmp_path, monkeypatch):
    few = ["--samples", "16", "--json", "--steps", "12", "--save-interval", "0", "--out", tmp_path]
    with stopping_after(7, "ritz.spectra.lanczos", monkeypatch):
        assert ritz("spectrum", "run", *OWN, "--split", "train", *few) == 1
    assert ritz("spectrum", "run", *OWN, "--split", "test", *few) == 0
    assert list(tmp_path.glob(".*.state"))  # that of the first, for when it is given again


def test_samples_of_the_test_data_are_counted(here, finished, tmp_path, capsys):
    """As many as were asked for, and the same ones for the same seed."""
    arguments = [
        "spectrum",
        "run",
        *OWN,
        "--split",
        "test",
        "--samples",
        "9",
        *FEW,
        "--json",
        "--out",
    ]
    assert ritz(*arguments, tmp_path / "one") == 0
    assert "9 samples" in capsys.readouterr().out
    assert ritz(*arguments, tmp_path / "two") == 0
    assert ritz(*arguments, tmp_path / "other", "--seed", "1") == 0
    name = "spectrum-hessian-eval-test-steps6-samples9"
    names = {"one": name, "two": name, "other": f"{name}-seed1"}
    one, two, other = (
        (tmp_path / folder / f"{name}.safetensors").read_bytes() for folder, name in names.items()
    )
    assert one == two != other


def test_a_torch_file_of_weights_with_model_and_data_is_measured(here, finished, tmp_path, capsys):
    torch.save(read_weights(finished / "weights.safetensors"), tmp_path / "weights.pt")
    arguments = [*OWN, "--batch-size", "16"]
    assert ritz("spectrum", tmp_path / "weights.pt", *arguments, *FEW, "--json") == 0
    assert ritz("spectrum", "run", *OWN, *FEW, "--json", "--out", tmp_path / "again") == 0
    (first,), (again,) = (
        map(library.load, folder.glob("spectrum*.safetensors"))
        for folder in (tmp_path, tmp_path / "again")
    )
    torch.testing.assert_close(first.values, again.values, rtol=0.0, atol=0.0)


def test_a_missing_run_or_file_is_one_line(here, finished, tmp_path, refused):
    assert "no such folder or file: nowhere" in refused("spectrum", "nowhere")
    assert "no weights in" in refused("spectrum", tmp_path)
    shutil.copy(finished / "weights.safetensors", tmp_path)
    assert "pass --model and --data" in refused("spectrum", tmp_path)
    assert "--average needs the folder" in refused("spectrum", tmp_path / "weights.safetensors",
                                                   "--average")  # fmt: skip
    assert "no weights" in refused("spectrum", tmp_path, "--average")
    (tmp_path / "run.json").write_text("{}")
    assert "does not describe a run of ritz" in refused("spectrum", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", "own_model:smooth"], "does not match the model: 0.weight is missing"),
        (
            ["--set-model", "width=5"],
            "1.weight is of shape (4, 6) in the file and of shape (5, 6) in the model",
        ),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--samples", "17", "--split", "test"], "--samples must be between 1 and 16, got 17"),
        (
            ["--save-interval", "-1"],
            "--save-interval must be at least 0.0, got -1.0",
        ),
        (
            ["--split", "validation"],
            "--split must be a part of the data, train or test, got 'validation'",
        ),
        (["--matrix", "fisher"], "--matrix must be one of hessian, ggn, both; got 'fisher'"),
        (["--model", "vgg61"], "no model is named 'vgg61'; did you mean"),
    ],
)
def test_bad_input_is_one_line(here, finished, refused, arguments, line):
    assert line in refused("spectrum", "run", *OWN, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_gpu_is_refused(here, finished, refused):
    assert "torch finds no CUDA device" in refused("spectrum", "run", *OWN, "--device", "cuda:0")


def test_weights_that_contain_code_are_refused(here, tmp_path, refused):
    import pickle

    class Malicious:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / "weights.pt").write_bytes(pickle.dumps(Malicious(), protocol=2))
    line = refused("spectrum", tmp_path / "weights.pt", *OWN)
    assert "is refused: it has pickled Python objects" in line
    assert not (tmp_path / "ran").exists()


def test_the_l2_term_is_added_on_request_and_named(here, finished, tmp_path, capsys):
    few = ["spectrum", "run", *OWN, "--steps", "5", "--precision", "float64", "--json"]
    results = []
    for options in ([], ["--l2", "0.5"]):
        assert ritz(*few, *options, "--out", tmp_path) == 0
        results.append(json.loads(capsys.readouterr().out))

    (plain,), (shifted,) = (result["result"].items() for result in results)
    assert shifted[0] == f"{plain[0]}, L2 term 0.5"
    # H + 0.5 I has the eigenvalues of H, shifted.
    values = torch.tensor(plain[1]["values"], dtype=torch.float64) + 0.5
    torch.testing.assert_close(torch.tensor(shifted[1]["values"], dtype=torch.float64), values)
    assert "l2=0.5" in results[1]["files"][0]


def test_a_budget_of_products_cuts_steps_and_long_work_is_announced(
    here, finished, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("ritz.cli._measurement.LONG", 0.0)
    both = ["--matrix", "both", "--max-products", "9", "--out", tmp_path]

    assert ritz("spectrum", "run", *OWN, *both) == 0

    assert "8 products on 48 samples: about" in capsys.readouterr().err
    found = [library.load(file) for file in tmp_path.glob("*max_products9.safetensors")]
    assert [len(spectrum.values) for spectrum in found] == [4, 4]


def test_a_budget_below_one_product_for_each_spectrum_is_refused(here, finished, refused):
    line = refused("spectrum", "run", *OWN, "--matrix", "both", "--max-products", "1")
    assert "--max-products must be at least 2, got 1" in line
