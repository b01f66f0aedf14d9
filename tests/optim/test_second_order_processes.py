"""Second-order optimisers in two processes take the steps of one, also with uneven shares."""

import pytest
import torch
from processes import run_processes

pytestmark = pytest.mark.distributed

SETTINGS = {
    "lanczos": ("lanczos_newton", {"lr": 0.3, "delta": 0.5, "num_steps": 6, "interval": 2,
                                   "momentum": 0.5, "weight_decay": 0.01}),
    "gradient": ("lanczos_newton", {"lr": 0.3, "delta": 0.5, "num_steps": 4, "matrix": "ggn",
                                    "start": "gradient"}),
    "free": ("hessian_free", {"delta": 0.5, "max_steps": 8}),
    "absolute": ("hessian_free", {"delta": 0.5, "max_steps": 5, "matrix": "hessian"}),
    "spectral": ("spectral_sgd", {"lr": 0.3, "num_steps": 6, "interval": 3, "nesterov": True}),
}  # fmt: skip
SCRIPT = f"""
    from torch import nn
    from ritz.training import fit

    for name, (optimizer, settings) in {SETTINGS!r}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        noise = torch.Generator().manual_seed(1)
        # Batches of 5 and 4: the processes have unequal shares.
        x = torch.randn(9, 3, generator=noise, dtype=torch.float64)
        y = torch.randint(0, 3, (9,), generator=noise)
        fit(model, (x, y), optimizer=optimizer, optimizer_settings=settings, num_epochs=3,
            batch_size=5, curvature_batch_size=7 if name == "lanczos" else None,
            damping="adaptive" if name == "gradient" else "constant")
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.save(flat, f"{{folder}}/{{name}}-{{size}}-{{rank}}.pt")
    dist.destroy_process_group()
"""


def test_two_processes_take_the_steps_of_one(tmp_path):
    for count in (1, 2):
        for code, error in run_processes(SCRIPT, count, tmp_path):
            assert code == 0, error

    for name in SETTINGS:
        expected = torch.load(tmp_path / f"{name}-1-0.pt")
        for rank in range(2):
            found = torch.load(tmp_path / f"{name}-2-{rank}.pt")
            # Sums in another order, which conjugate gradients and Lanczos amplify a little.
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
