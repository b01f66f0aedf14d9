"""The layers of the library: what may import what, read from the source."""

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

import ritz

SOURCE = Path(ritz.__file__).parent
RANKS = {
    "_core": 0,
    "operators": 1,
    "rmt": 1,
    "models": 1,
    "data": 1,
    "testing": 2,
    "spectra": 2,
    "curvature": 2,
    "graphs": 3,
    "measures": 3,
    "optim": 3,
    "training": 4,
    "plots": 4,
    "studies": 5,
    "report": 5,
    "cli": 6,
}
EXEMPT = {"ritz", "ritz.__main__", "ritz.version"}
CORE = {"_core", "operators", "rmt", "spectra", "testing", "curvature", "measures", "optim"}
CORE_IMPORTS = {"torch", "numpy", "scipy", "safetensors", "ritz", *sys.stdlib_module_names}

FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {
    ".".join(("ritz", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in FILES
}
PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


def imports(module, source):
    """Names of all modules a module imports, wherever in it the statement stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively in line {node.lineno}"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in submodules if name in MODULES]
            yield from found or [node.module]


def layer(module):
    return module.split(".")[1] if module.count(".") else ""


def violations(module, source):
    own = layer(module)
    for name in imports(module, source):
        package = name.split(".")[0]
        if own in CORE and package not in CORE_IMPORTS:
            yield f"{module} must not import {name}"
        if package != "ritz" or name == "ritz.version" or layer(name) == own:
            continue
        if RANKS.get(layer(name), 99) >= RANKS[own]:
            yield f"{module} (rank {RANKS[own]}) must not import {name}"


def test_every_package_has_a_rank():
    assert {layer(name) for name in MODULES} - {"", "__main__", "version"} <= set(RANKS)


@pytest.mark.parametrize("module", sorted(set(MODULES) - EXEMPT))
def test_imports_go_down(module):
    assert not list(violations(module, MODULES[module].read_text()))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ritz._core.checks", "import ritz.operators.base"),
        ("ritz._core.checks", "from ritz import operators"),
        ("ritz._core.checks", "import ritz"),
        ("ritz.operators.base", "from ritz.operators.dense import DenseOperator\nimport pandas"),
        ("ritz.spectra.krylov", "def f():\n    from ritz.testing import wigner"),
        ("ritz.plots.figures", "import ritz.studies.protocol"),
        ("ritz.studies.protocol", "from ritz.report import render"),
    ],
)
def test_a_breach_is_seen(module, source):
    assert list(violations(module, source))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_bears_the_name_of_a_function_beside_it(package):
    module = importlib.import_module(package)
    names = {found.name for found in pkgutil.iter_modules(module.__path__)}
    public = {name for name in dir(module) if not name.startswith("_")}
    clashes = {name for name in names & public if not isinstance(getattr(module, name), type(ast))}
    assert not clashes
