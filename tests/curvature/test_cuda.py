"""Curvature on a GPU is that on the CPU."""

import copy
from functools import partial

import pytest
import torch
from curvature.networks import case

import ritz
from ritz.curvature import Risk, fisher, ggn, gradient_covariance, hessian, kfac
from ritz.measures import curvature_variance, sharpness

pytestmark = pytest.mark.gpu

NAMES = ["mlp", "cnn eval", "cnn train", "cnn recomputed", "residual train", "layer norm",
         "group norm", "tied", "lstm", "gru", "encoder", "decoder", "dictionaries"]  # fmt: skip
OPERATORS = {
    "hessian": hessian,
    "ggn": ggn,
    "empirical": partial(fisher, kind="empirical"),
    "sampled": fisher,
    "covariance": gradient_covariance,
}


def moved(name, **options):
    own = case(name)
    model = copy.deepcopy(own.model).cuda()
    return Risk(model, own.loss_fn, own.data, **(own.options | options))


@pytest.mark.parametrize("engine", ["linearized", "eager"])
@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("name", NAMES)
def test_products_on_the_gpu_equal_products_on_the_cpu(name, kind, engine):
    expected = OPERATORS[kind](case(name).risk(), engine="eager").dense()
    op = OPERATORS[kind](moved(name), engine=engine)
    assert op.device.type == "cuda"
    found = op.dense().cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    single = op @ torch.eye(op.shape[0], dtype=op.dtype, device="cuda")[:, 0]
    torch.testing.assert_close(single.cpu(), found[:, 0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["empirical", "sampled", "covariance"])
def test_fisher_matrices_on_the_gpu_equal_those_on_the_cpu(kind):
    expected = OPERATORS[kind](case("cnn eval").risk()).dense()
    found = OPERATORS[kind](moved("cnn eval")).dense().cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def test_float32_and_tf32_products_are_close_to_float64():
    exact = hessian(case("cnn train").risk(), engine="eager").dense()
    for precision, atol in (("float32", 1e-4), ("tf32", 3e-2)):
        op = hessian(moved("cnn train", precision=precision))
        assert op.dtype == torch.float32
        gap = (op.dense().cpu().double() - exact).abs().max()
        assert float(gap) < atol * float(exact.abs().max())


def test_structure_measures_and_spectra_on_a_gpu():
    here, there = case("cnn eval").risk(), moved("cnn eval")
    assert float(ritz.trace(ggn(there))) == pytest.approx(float(ritz.trace(ggn(here))), rel=1e-9)
    torch.testing.assert_close(kfac(there).dense().cpu(), kfac(here).dense())
    assert there.loss() == pytest.approx(here.loss(), rel=1e-12)
    left, right = (ritz.lanczos(hessian(risk), num_steps=8) for risk in (here, there))
    torch.testing.assert_close(left.values, right.values, rtol=1e-8, atol=1e-10)
    report = sharpness(there, num_steps=6, num_probes=2)
    assert str(report)
    variance = [curvature_variance(risk, num_probes=4, group_size=1) for risk in (here, there)]
    torch.testing.assert_close(variance[0].mean, variance[1].mean)


def test_a_batch_too_large_for_the_device_is_cut(monkeypatch):
    expected = hessian(case("mlp").risk(), engine="eager").dense()
    op = hessian(moved("mlp"))
    whole = op.products._part

    def limited(vectors, key, context):
        if len(context.batch[0]) > 2 or op.products.block_size > 1:
            raise torch.OutOfMemoryError("no more")
        return whole(vectors, key, context)

    monkeypatch.setattr(op.products, "_part", limited)
    torch.testing.assert_close(op.dense().cpu(), expected)
    assert "2 samples at a time" in op.products.plan


def test_compiled_products_are_the_same():
    expected = hessian(case("cnn train").risk(), engine="eager").dense()
    op = hessian(moved("cnn train"), compile=True)
    torch.testing.assert_close(op.dense().cpu(), expected, rtol=0, atol=1e-9)
    assert "compiled" in op.products.plan
