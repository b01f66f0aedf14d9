"""Example scripts, and code blocks of the README and the guides, run as written."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import output_of

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


SCRIPT = """
import runpy
sys.argv = [{path!r}, "--quick", "--out", "found"]
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_script_runs(script, tmp_path):
    output_of(SCRIPT.format(path=str(script)), tmp_path)
    assert list(tmp_path.glob("found/*.png"))
    assert list(tmp_path.glob("found/*.safetensors"))


def section(title):
    """Return the text of a section of the README."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, flags=re.DOTALL | re.MULTILINE)[1]


def code(title):
    """Return the Python block of a section of the README."""
    (block,) = re.findall(r"```python\n(.*?)```", section(title), flags=re.DOTALL)
    return block


def without_numbers(line):
    return re.sub(r"-?\d[\d.,]*(?:e[+-]?\d+)?", "#", " ".join(line.split()))


# Sections of the README, run one after the other in one session, with smaller sizes.
SMALLER = {
    "A network": {},
    "Batch size and learning rate": {},
    "A kernel matrix": {"3000": "300"},
    "Any other matrix": {"300": "30", "90_000": "900"},
    "A graph": {"[50] * 20": "[10] * 20", "1000": "200"},
    "Error bars": {},
    "An optimiser": {},
}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run the code of the README from top to bottom; return its output and the folder."""
    program = ""
    for title, changes in SMALLER.items():
        block = code(title)
        for large, small in changes.items():
            assert large in block
            block = block.replace(large, small)
        program += block
    folder = tmp_path_factory.mktemp("readme")
    # In a new process, in which the code must import all that it needs.
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), folder


def test_every_python_block_of_the_readme_is_tested():
    titles = re.findall(r"^## (.*)$", README, flags=re.MULTILINE)
    assert [title for title in titles if "```python" in section(title)] == list(SMALLER)
    assert README.count("```python") == len(SMALLER)


def test_the_first_example_prints_the_output_shown_in_the_readme(session):
    shown = re.search(r"```text\n(.*?)```", section("A network"), flags=re.DOTALL)[1].splitlines()
    printed = session[0][: len(shown)]

    assert [without_numbers(line) for line in printed] == [without_numbers(line) for line in shown]
    values = [[float(line.split()[0]) for line in lines if re.match(r"^ +-?\d+\.\d+ ", line)]
              for lines in (shown, printed)]  # fmt: skip
    assert len(values[0]) == 12
    assert values[1] == pytest.approx(values[0], rel=0.05)


def test_the_readme_runs_from_top_to_bottom(session):
    written = {path.name for path in session[1].iterdir()}
    assert written == {"spectrum.png", "spectrum.safetensors", "density.png"}


@pytest.mark.parametrize("page", ["choosing", "optimizers"])
def test_a_guide_runs_from_top_to_bottom(page, tmp_path):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert output_of("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), tmp_path)


# Additional options that make the commands of the README fast.
QUICK = {
    "train": ["--epochs", "2"],
    "spectrum": ["--steps", "5"],
    "sharpness": ["--steps", "5", "--probes", "2", "--samples", "128"],
    "landscape": ["--steps", "5", "--points", "3"],
    "plot": [],
    "sweep": ["--epochs", "2", "--seeds", "2", "--jobs", "1"],
}


def test_the_commands_of_the_readme_run_with_a_user_defined_model(tmp_path):
    for name in ("model.py", "data.py"):
        shutil.copy(ROOT / "examples" / "custom_model" / name, tmp_path)
    shell = re.search(r"```\n(ritz train --model model:net.*?)```", README, flags=re.DOTALL)[1]
    commands = [shlex.split(line) for line in shell.splitlines()]
    assert [(command[0], command[1]) for command in commands] == [("ritz", name) for name in QUICK]
    given = [[name, *rest, *QUICK[name]] for _, name, *rest in commands]
    code = f"from ritz.cli import _app\nfor given in {given!r}: assert _app.run(given) == 0, given"
    output_of(code, tmp_path)
    for found in ("weights.safetensors", "sharpness*.safetensors", "spectrum*.png",
                  "landscape*.png", "curves.png"):  # fmt: skip
        assert list((tmp_path / "run").glob(found)), found


def test_the_command_in_the_gallery_has_the_settings_of_its_figure():
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").replace("\\\n", "")
    printed = re.search(r"ritz train .*gadamx.*", text)[0]
    script = (ROOT / "benchmarks" / "cifar100.sh").read_text(encoding="utf-8")
    for setting in ("--lr 0.1", "--weight-decay 2.5e-3", "--schedule linear", "--evaluate-every 5"):
        assert setting in printed
        assert setting in script
    for setting, variable in (("--average-from 161", "START:-161"), ("--epochs 300", "EPOCHS:-300"),
                              ("--precision bfloat16", "PRECISION:-bfloat16")):  # fmt: skip
        assert setting in printed
        assert variable in script


def test_examples_are_found():
    assert SCRIPTS
