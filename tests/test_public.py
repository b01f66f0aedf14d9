"""The public names of ritz, and what importing it loads."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ritz

LIBRARIES = ["torch", "numpy", "scipy", "safetensors"]
EXTRAS = ["matplotlib", "typer", "rich", "networkx", "sklearn", "PIL", "numba"]


def test_ritz_exports_at_most_45_names():
    public = [name for name in dir(ritz) if not name.startswith("_")]
    assert len(public) <= 45
    assert set(public) | {"__version__"} == set(ritz.__all__)


@pytest.mark.parametrize("name", ritz.__all__)
def test_every_public_name_exists_and_has_a_docstring(name):
    thing = getattr(ritz, name)
    assert name == "__version__" or thing.__doc__


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(ritz.__file__).read_text())
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(branch.test) == "TYPE_CHECKING"

    names = [alias.name for node in branch.body for alias in node.names]

    assert sorted([*names, "__version__"]) == sorted(ritz.__all__)


def test_a_public_name_is_cached_after_first_use():
    assert ritz.lanczos is ritz.spectra.lanczos
    assert {"lanczos", "spectra"} <= set(vars(ritz))


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'ritz' has no attribute 'eigs'"):
        _ = ritz.eigs


def test_import_ritz_imports_neither_torch_nor_sub_packages():
    code = (
        "import sys, ritz\n"
        f"print([name for name in {LIBRARIES + EXTRAS} if name in sys.modules])\n"
        "print(sorted(name for name in sys.modules if name.startswith('ritz.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n['ritz._version']\n"


# Statements that are executed one after the other in one process, and modules that none of them
# may import up to there.
STATEMENTS = {
    "import ritz.operators, ritz.spectra, ritz.testing": [*EXTRAS, "ritz.plots", "ritz.studies"],
    "import ritz.data": ["sklearn", "PIL"],
    "import ritz.training": ["lightning", "transformers", "tensorboard", "wandb", "mlflow"],
    "ritz.plots.spectrum(ritz.lanczos(numpy.eye(4), num_steps=1)).figure.savefig(io.BytesIO())": [
        "matplotlib.pyplot"
    ],
    "ritz.studies.available()": [],
}


@pytest.fixture(scope="module")
def too_many():
    """The modules that each statement or one before it has imported, of those it may not."""
    program = ["import io, json, sys, numpy, ritz"]
    for statement, modules in STATEMENTS.items():
        program += [statement, f"print(json.dumps([m for m in {modules} if m in sys.modules]))"]
    command = [sys.executable, "-c", "\n".join(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(STATEMENTS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("statement", STATEMENTS)
def test_libraries_and_packages_are_imported_on_first_use(statement, too_many):
    assert too_many[statement] == []


def test_a_misspelt_name_is_corrected_in_the_traceback():
    done = subprocess.run(
        [sys.executable, "-c", "import ritz; ritz.hesian"], capture_output=True, text=True
    )
    assert done.stderr.rstrip().endswith("Did you mean: 'hessian'?")
