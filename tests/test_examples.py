"""Every script in ``examples``, and the README's first example, runs in a process of its own."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def run(*arguments, cwd):
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(script, tmp_path):
    run(script, "--quick", "--out", "found", cwd=tmp_path)
    assert list(tmp_path.glob("found/*.png"))
    assert list(tmp_path.glob("found/*.safetensors"))


NETWORK = """
import matplotlib, torch
matplotlib.use("Agg")
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
loader = torch.utils.data.DataLoader(data, batch_size=20)
"""


def blocks():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_readme_runs_on_a_small_network(tmp_path):
    code = blocks()[0].replace("num_steps=100", "num_steps=10")
    code = code.replace("ritz.sharpness(risk)", "ritz.sharpness(risk, num_steps=10)")
    run("-c", NETWORK + code, cwd=tmp_path)


def test_the_readme_runs_at_a_hundredth_of_its_size(tmp_path):
    code = blocks()[1]
    small = code.replace("300", "30").replace("90_000", "900")
    run("-c", small, cwd=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"spectrum.png", "spectrum.safetensors"}


TRAINING = """
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    schedule.step()
evaluate = lambda model: print([model(x) for x, _ in loader])
any_torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_the_readme_trains_a_small_network(tmp_path):
    code = blocks()[2].replace("160", "1").replace("...  ", TRAINING + "#")
    run("-c", NETWORK + "import ritz\n" + code, cwd=tmp_path)


# Fewer epochs, steps and points; all else as it is printed.
QUICK = {
    "train": ["--epochs", "2"],
    "spectrum": ["--steps", "5"],
    "sharpness": ["--steps", "5", "--probes", "2", "--samples", "128"],
    "landscape": ["--steps", "5", "--points", "3"],
    "plot": [],
}


def test_a_model_of_ones_own_in_five_commands(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("model.py", "data.py"):
        own = (ROOT / "examples" / "own" / name).read_text(encoding="utf-8")
        assert f"```python\n{own}```" in text
        (tmp_path / name).write_text(own, encoding="utf-8")
    shell = re.search(r"```\n(ritz train --model model:net.*?)```", text, flags=re.DOTALL)[1]
    commands = [shlex.split(line) for line in shell.splitlines()]
    assert [(command[0], command[1]) for command in commands] == [("ritz", name) for name in QUICK]
    given = [[name, *rest, *QUICK[name]] for _, name, *rest in commands]
    # One process for all five, which spares four imports of torch.
    code = f"from ritz.cli import _app\nfor given in {given!r}: assert _app.run(given) == 0, given"
    run("-c", code, cwd=tmp_path)
    for found in ("weights.safetensors", "sharpness*.safetensors", "spectrum*.png",
                  "landscape*.png", "curves.png"):  # fmt: skip
        assert list((tmp_path / "run").glob(found)), found


def test_the_printed_run_has_the_settings_of_the_figure_below_it():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    printed = re.search(r"ritz train .*gadamx.*", text)[0]
    script = (ROOT / "benchmarks" / "cifar100.sh").read_text(encoding="utf-8")
    for setting in ("--lr 0.1", "--weight-decay 2.5e-3", "--schedule linear", "--evaluate-every 5"):
        assert setting in printed
        assert setting in script
    for setting, variable in (("--average-from 161", "START:-161"), ("--epochs 300", "EPOCHS:-300"),
                              ("--precision bfloat16", "PRECISION:-bfloat16")):  # fmt: skip
        assert setting in printed
        assert variable in script


def test_there_are_examples():
    assert SCRIPTS
