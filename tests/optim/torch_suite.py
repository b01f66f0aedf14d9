"""Runs torch's own tests of optimisers on those of this library.

    python torch_suite.py path/to/pytorch/test/test_optim.py

The optimisers of torch's table are replaced before its test file is imported; the last line printed
is a JSON object of counts.
"""

import importlib.util
import json
import sys
import unittest
from pathlib import Path
from types import ModuleType

import torch
from torch.testing._internal import common_optimizers as table

from ritz import optim

SHARED = ("foreach", "differentiable")
# These patch functions of torch's own modules by name.
NOT_OURS = ("test_defaults_changed_to_foreach",)
FORMS = ({"partial": 0.2}, {"form": "published", "weight_decay": 0.1}, {"form": "inside"})


def inputs(*more, **defaults):
    """What torch tries on Adam, with numbers for betas, and ``more``, on top of ``defaults``."""

    def function(device, dtype=None):
        found = [one for one in table.optim_inputs_func_adam(device, dtype) if _plain(one)]
        found += [table.OptimizerInput(params=None, kwargs=dict(one)) for one in more]
        for one in found:
            # A step without gradients moves nothing only where nothing decays.
            one.kwargs = {"weight_decay": 0.0} | defaults | one.kwargs
            if dtype == torch.float16:
                one.kwargs["eps"] = 0.1
        return found

    return function


def _plain(one):
    return not isinstance(one.kwargs.get("betas", (0,))[0], torch.Tensor)


def damped_inputs(device, dtype=None):
    found = inputs()(device, dtype)
    for one in found:
        if "eps" in one.kwargs:
            one.kwargs["delta"] = one.kwargs.pop("eps")
    return found


def errors(device, dtype):
    """The errors torch asks of all optimisers; those of single arguments have our own words."""
    return table.get_error_inputs_for_all_optims(device, dtype)


def info(cls, make_inputs, *, fused):
    adamw = next(one for one in table.optim_db if one.optim_cls is torch.optim.AdamW)
    return table.OptimizerInfo(
        cls,
        optim_inputs_func=make_inputs,
        optim_error_inputs_func=errors,
        supported_impls=(*SHARED, "fused") if fused else SHARED,
        not_og_supported_flags=adamw.not_og_supported_flags,
        supports_fused_on=("cpu", "cuda") if fused else (),
        has_capturable_arg=True,
        decorators=adamw.decorators,
    )


def optimizers():
    return [
        info(optim.DampedAdamW, damped_inputs, fused=True),
        info(optim.Gadam, inputs(start=3, interval=2), fused=True),
        info(optim.GadamX, inputs(*FORMS, start=3, interval=2), fused=False),
        info(optim.Padam, inputs(*FORMS), fused=False),
        info(optim.PadamW, inputs(*FORMS), fused=False),
    ]


def load(path):
    # The file pulls in tests of schedulers and of torch's own optimisers, which are not ours.
    for name in ("optim", "optim.test_lrscheduler", "optim.test_optim", "optim.test_swa_utils"):
        sys.modules[name] = ModuleType(name)
    sys.modules["optim.test_lrscheduler"].TestLRScheduler = None
    sys.modules["optim.test_optim"].TestDifferentiableOptimizer = None
    sys.modules["optim.test_swa_utils"].TestSWAUtils = None
    table.optim_db = optimizers()
    spec = importlib.util.spec_from_file_location("torch_test_optim", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_test_optim"] = module
    spec.loader.exec_module(module)
    for value in vars(module).values():
        for name in [name for name in dir(value) if name.startswith(NOT_OURS)]:
            delattr(value, name)
    return module


def main():
    module = load(Path(sys.argv[1]))
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(verbosity=1).run(suite)
    counts = {
        "run": result.testsRun,
        "skipped": [f"{test}: {reason}" for test, reason in result.skipped],
        "failed": [str(test) for test, _ in (*result.failures, *result.errors)],
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
