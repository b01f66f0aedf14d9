import json

import pytest
import torch
from cli.own import ritz

import ritz as library

STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture
def spectra(tmp_path):
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        found = library.lanczos(
            torch.diag(torch.arange(1.0, 21.0)), num_steps=6, generator=generator
        )
        library.save(found, tmp_path / f"spectrum{seed}.safetensors")
    return [tmp_path / f"spectrum{seed}.safetensors" for seed in (0, 1)]


@pytest.mark.parametrize("kind", STARTS)
def test_a_log_is_drawn_in_the_format_of_the_file_name(finished, tmp_path, capsys, kind):
    picture = tmp_path / f"curves.{kind}"
    assert ritz("plot", finished, "--out", picture) == 0
    assert picture.read_bytes().startswith(STARTS[kind])
    # What monitors logged is a second picture.
    second = tmp_path / f"curves-watched.{kind}"
    assert second.read_bytes().startswith(STARTS[kind])
    names = "curves, curvature, degeneracy, lambda_max, sharpness_ratio, ritz_values"
    names += ", weight_norm, weight_max"
    written = f"written: {picture}, {second}"
    assert (
        capsys.readouterr().out == f"--what NAME draws one of these alone: {names}\n\n{written}\n"
    )


def test_one_or_several_results_are_drawn(spectra, tmp_path, capsys):
    assert ritz("plot", spectra[0], "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "result": None, "files": [str(tmp_path / "spectrum0.png")]
    }  # fmt: skip
    assert ritz("plot", *spectra, "--out", tmp_path / "both.png") == 0
    assert (tmp_path / "both.png").read_bytes() != (tmp_path / "spectrum0.png").read_bytes()


@pytest.mark.parametrize("what", ["curvature", "degeneracy", "watched", "weight_norm"])
def test_logged_curvature_is_drawn(finished, tmp_path, what):
    assert ritz("plot", finished, "--what", what, "--out", tmp_path / "seen.png") == 0
    assert (tmp_path / "seen.png").exists()


def test_two_runs_are_drawn_in_one_figure(finished, tmp_path):
    (tmp_path / "log.jsonl").write_bytes((finished / "log.jsonl").read_bytes())
    assert ritz("plot", finished, tmp_path, "--out", tmp_path / "two.png") == 0


def test_bad_input_is_one_line(finished, spectra, tmp_path, refused):
    log = finished / "log.jsonl"
    assert "no such file or folder: nowhere" in refused("plot", "nowhere")
    assert "the file of a figure must end in .png, .svg or .pdf" in refused(
        "plot", log, "--out", "x.gif"
    )
    assert "there is no folder" in refused("plot", log, "--out", tmp_path / "no" / "x.png")
    assert "logs and results cannot be drawn in one figure" in refused("plot", log, spectra[0])
    (tmp_path / "again.jsonl").write_bytes(log.read_bytes())
    assert "takes one log, got 2" in refused("plot", log, tmp_path / "again.jsonl", "--what",
                                             "curvature", "--out", tmp_path / "x.png")  # fmt: skip
    assert "gsnr was not logged by a monitor, which logged lambda_max, sharpness_ratio" in refused(
        "plot", log, "--what", "gsnr", "--out", tmp_path / "x.png"
    )
    (tmp_path / "x.safetensors").write_bytes(b"")
    assert "truncated or not a safetensors file" in refused("plot", tmp_path / "x.safetensors")
    library.save(library.trace(torch.eye(3)), tmp_path / "trace.safetensors")
    assert "Estimate without samples has no plot" in refused("plot", tmp_path / "trace.safetensors")
    both = [spectra[0], tmp_path / "trace.safetensors"]
    assert "must all be spectra" in refused("plot", *both, "--out", tmp_path / "x.png")
    (tmp_path / "empty.jsonl").write_text("")
    assert "at least one finished epoch, got none" in refused("plot", tmp_path / "empty.jsonl")


@pytest.mark.parametrize("text", ["{not: json}\n", "[1, 2]\n", '{"epoch": 1}\n', "\udcff\n"])
def test_a_file_that_is_not_a_log_is_named(tmp_path, refused, text):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(text.encode(errors="surrogateescape"))
    assert f"{bad} is not a log of ritz train: " in refused("plot", bad)
