"""Computations change neither the model nor generators, settings or data."""

import copy
import importlib
import inspect
import pkgutil
import random

import numpy as np
import pytest
import torch
from curvature.networks import images, moved, noise
from curvature.structures import ggn_diagonal, ggn_trace
from torch import nn
from torch.nn import functional

import ritz
from ritz import curvature, measures
from ritz.curvature import Risk, hessian
from ritz.curvature._shared import batch_products

PACKAGES = (curvature, measures)


def network():
    """Batch norm, dropout, a frozen parameter, a hook, modules in unlike modes, and gradients."""
    layers = [
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(8, 3),
    ]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = moved(nn.Sequential(*layers)).train()
    model[2].eval()
    model[0].bias.requires_grad_(False)
    model[6].weight.grad = noise(3, 8)
    model[6].register_forward_hook(lambda layer, args, output: None)
    return model


def state(model, data):
    """Copies of all that must stay as it is."""
    modules = list(model.modules())
    return copy.deepcopy(
        {
            "state": model.state_dict(),
            "gradients": {name: p.grad for name, p in model.named_parameters()},
            "required": [p.requires_grad for p in model.parameters()],
            "modes": [module.training for module in modules],
            "tracking": [getattr(module, "track_running_stats", None) for module in modules],
            "names": [sorted(name for name in vars(m) if name[0] != "_") for m in modules],
            "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
                      for m in modules],
            "data": data,
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002
            "settings": (torch.is_grad_enabled(), torch.get_default_dtype(),
                         torch.backends.mha.get_fastpath_enabled(),
                         torch.backends.cuda.flash_sdp_enabled(),
                         torch.backends.cuda.matmul.allow_tf32),
        }
    )  # fmt: skip


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def unchanged(before, after):
    for name in before:
        assert same(before[name], after[name]), f"{name} must not change"


def vector(risk, seed=0):
    return noise(len(risk.theta), seed=seed)


def multiplied(op):
    return op @ noise(op.shape[0])


def spectrum(risk):
    return ritz.lanczos(hessian(risk, engine="eager"), num_steps=3, vectors=True)


def rebuilt(risk, model):
    """Return the risk of another model on the same data."""
    data = [batch for _, batch in risk._batches]
    return Risk(model, risk.loss_fn, data, batch_norm=risk.batch_norm)


# Every public function that is given a risk or a model.
CALLS = {
    "advice_cost": lambda f, r: f(r, batch_sizes=[2, 4]),
    "advise": lambda f, r: f(r, batch_sizes=[2, 4]),
    "batch_prediction": lambda f, r: f(r, batch_sizes=[2, 4], num_vectors=2, num_draws=10),
    "block_diagonal": lambda f, r: multiplied(f(r)),
    "calibrated_sharpness": lambda f, r: f(r.model, *[lambda model: rebuilt(r, model)] * 2),
    "critical_sharpness": lambda f, r: f(r),
    "curvature_operator": lambda f, r: multiplied(f(r, "ggn", engine="eager")),
    "curvature_variance": lambda f, r: f(r, num_probes=2),
    "distance": lambda f, r: f(r, torch.zeros_like(r.theta)),
    "excess_risk": lambda f, r: f(r, r.at(vector(r))),
    "filter_normalized": lambda f, r: f(r, vector(r)),
    "fisher": lambda f, r: multiplied(f(r, engine="eager")),
    "fluctuation": lambda f, r: multiplied(f(r, r.batch(0))),
    "fold_batch_norm": lambda f, r: f(r.model),
    "ggn": lambda f, r: multiplied(f(r)),
    "gradient_covariance": lambda f, r: multiplied(f(r, engine="eager")),
    "gradient_noise": lambda f, r: f(r, num_probes=2),
    "gradient_overlap": lambda f, r: f(r, spectrum(r)),
    "gradient_statistics": lambda f, r: (f(r, by="batch"), f(r)),
    "hessian": lambda f, r: multiplied(f(r)),
    "kfac": lambda f, r: multiplied(f(r)),
    "landscape": lambda f, r: f(
        r, {"some": vector(r)}, num_points=3, batch_norm="recomputed", test=r
    ),
    "landscape2d": lambda f, r: f(r, vector(r), vector(r, 1), num_points=3),
    "measured_batches": lambda f, r: f(
        r, batch_sizes=[2], leading=functional.normalize(vector(r), dim=0), num_batches=2
    ),
    "noise_sample": lambda f, r: f(r, "full"),
    "random_direction": lambda f, r: f(r),
    "rank_bound": lambda f, r: f(r),
    "scaled": lambda f, r: f(r.model, 2.0),
    "sharpness": lambda f, r: f(r, num_steps=3, num_probes=2, engine="eager"),
    "shrinkage": lambda f, r: f(r, batch_sizes=[2], num_probes=2),
    "summary": lambda f, r: f(r),
    "temperature": lambda f, r: f(r),
    "trainable_rate": lambda f, r: f(
        r, torch.optim.SGD, batch_size=2, start=0.01, num_steps=2, num_trials=2
    ),
}
METHODS = {
    "loss": lambda r: r.loss(),
    "gradient": lambda r: r.gradient(),
    "at": lambda r: r.at(vector(r)).loss(),
    "on": lambda r: r.on("6").gradient(),
    "batch": lambda r: r.batch(1).gradient(),
    "samples": lambda r: r.samples(torch.tensor([1, 0])).loss(),
    "with_batch_norm": lambda r: r.with_batch_norm("recomputed").loss(),
    "join_batches": lambda r: r.join_batches(),
    "diagnose": lambda r: r.diagnose(),
    "lanczos": spectrum,
    "batch_products": lambda r: list(batch_products(r, vector(r))),
    "ggn_diagonal": ggn_diagonal,
    "ggn_trace": ggn_trace,
}


def functions():
    """Public functions by name, wherever in the two packages they live."""
    found = {}
    for package in PACKAGES:
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            members = vars(importlib.import_module(module.name)).items()
            found |= {
                name: member
                for name, member in members
                if inspect.isfunction(member) and member.__module__ == module.name
            }
    return found


FUNCTIONS = functions()


def takes_risk_or_model(function):
    kinds = {Risk, "Risk", nn.Module}
    return any(p.annotation in kinds for p in inspect.signature(function).parameters.values())


def test_the_table_lists_every_public_function_of_a_risk():
    public = {
        name
        for package in PACKAGES
        for name in getattr(package, "__all__", ())
        if inspect.isfunction(getattr(package, name))
        and takes_risk_or_model(getattr(package, name))
    }
    assert public >= {"hessian", "ggn", "fisher"}
    assert public <= set(CALLS), f"to be put in the table: {sorted(public - set(CALLS))}"


def run(call, mode):
    model, data = network(), images(4, 4)
    before = state(model, data)
    risk = Risk(model, functional.cross_entropy, data, batch_norm=mode)
    unchanged(before, state(model, data))
    theta = risk.theta.clone()
    refused = ""
    try:
        call(risk)
    except ValueError as error:
        refused = str(error)
    # Batch statistics leave no samples that are independent of each other; and weights that were
    # never trained may be no better than chance.
    assert not refused or mode == "train" or "the optimal temperature is infinite" in refused
    assert torch.equal(risk.theta, theta)
    unchanged(before, state(model, data))


@pytest.mark.parametrize("mode", ["eval", "train", "recomputed"])
@pytest.mark.parametrize("name", sorted(set(CALLS) & set(FUNCTIONS)))
def test_functions_leave_model_modes_and_generators_unchanged(name, mode):
    run(lambda risk: CALLS[name](FUNCTIONS[name], risk), mode)


@pytest.mark.parametrize("mode", ["eval", "train", "recomputed"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_leave_model_modes_and_generators_unchanged(name, mode):
    run(METHODS[name], mode)


@pytest.mark.parametrize("dropout", ["off", "fixed"])
@pytest.mark.parametrize("mode", ["eval", "train", "recomputed"])
def test_an_error_leaves_model_modes_and_generators_unchanged(mode, dropout):
    model, data = network(), images(4, 4)
    risk = Risk(model, functional.cross_entropy, data, batch_norm=mode, dropout=dropout)

    def failing(layer, args, output):
        raise KeyboardInterrupt

    handle = model[5].register_forward_hook(failing)
    before = state(model, data)
    ops = hessian(risk), hessian(risk, engine="eager")
    for call in (
        risk.loss,
        risk.gradient,
        lambda: ops[0] @ risk.theta,
        lambda: ops[1] @ risk.theta,
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
        unchanged(before, state(model, data))
    handle.remove()
    assert risk.loss() > 0


def test_products_do_not_depend_on_the_global_generators():
    model, data = network(), images(4, 4)
    found = []
    for seed in (0, 1):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            risk = Risk(model, functional.cross_entropy, data, dropout="fixed", batch_norm="train")
            found.append(hessian(risk, engine="eager") @ vector(risk))
    assert torch.equal(*found)
