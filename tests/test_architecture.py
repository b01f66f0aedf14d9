"""Checks of the architecture: layers, borders, files that pages name, and the number of names."""

import ast
import importlib
import inspect
import io
import pkgutil
import re
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import ritz

SOURCE = Path(ritz.__file__).parent
ROOT = SOURCE.parents[1]
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
    "optim": 4,
    "training": 5,
    "plots": 5,
    "studies": 6,
    "cli": 7,
}
EXEMPT = {"ritz", "ritz.__main__", "ritz._version"}
CORE = {"_core", "operators", "rmt", "spectra", "testing", "curvature", "measures", "optim"}
CORE_IMPORTS = {"torch", "numpy", "scipy", "safetensors", "typing_extensions", "ritz"}
CORE_IMPORTS |= sys.stdlib_module_names
OPTIONAL = {"ritz.operators._native": {"numba", "llvmlite"}}  # imported only if it is installed
# Packages that may import from the _shared.py of a package.
SHARED = {
    "operators": {"spectra", "curvature", "graphs", "measures", "cli"},
    "spectra": {"graphs", "measures", "plots", "studies", "training"},
    "curvature": {"measures", "optim", "training", "studies"},
    "graphs": {"studies", "cli"},
    "measures": {"optim"},
    "optim": {"training"},
    "training": {"studies", "cli"},
    "plots": {"studies", "cli"},
}
LONGEST_CHAIN = 6
LONGEST_FILE = 700
LONGEST_BODY = 60
FEWEST_COMMENTS = 8  # per 100 lines of code


def module_name(path):
    parts = ("ritz", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}
# Modules that only re-export.
FACADES = PACKAGES | {name for name in MODULES if name.endswith("._shared")}
TOP_PACKAGES = sorted(
    name for name in PACKAGES if name.count(".") == 1 and not name.startswith("ritz._")
)


def package(module):
    """Return ``spectra`` for ``ritz.spectra._lanczos.spectrum``."""
    return module.split(".")[1] if "." in module else ""


@cache
def imports(module, source):
    """Return pairs of an imported module and the imported name, also inside functions."""
    pairs = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively in line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                pairs.append((inner, None) if inner in MODULES else (node.module, alias.name))
    return pairs


def layer_breaches(module, source):
    own = package(module)
    for name, _ in imports(module, source):
        allowed = CORE_IMPORTS | OPTIONAL.get(module, set())
        if own in CORE and name.split(".")[0] not in allowed:
            yield f"{module} must not import {name}"
        if name.split(".")[0] != "ritz" or name == "ritz._version" or package(name) == own:
            continue
        if name == "ritz" and own == "cli":  # commands import ritz, which loads packages lazily
            continue
        if RANKS.get(package(name), 99) >= RANKS[own]:
            yield f"{module} (rank {RANKS[own]}) must not import {name}"


def border_breaches(module, source):
    """Yield imports of private modules of another package or sub-package."""
    for name, _ in imports(module, source):
        parts = name.split(".")
        if parts[0] != "ritz" or len(parts) < 3 or package(name) == "_core":
            continue
        if package(name) == package(module):
            # Only modules of ritz.spectra._lanczos import ritz.spectra._lanczos.spectrum.
            if len(parts) == 4 and module.split(".")[:3] != parts[:3]:
                yield f"{module} must import from {'.'.join(parts[:3])}, not from {name}"
        elif parts[2] == "_shared" and package(module) in SHARED.get(package(name), ()):
            continue
        elif parts[2].startswith("_"):
            yield f"{module} must not import {name}, which is private to {package(name)}"


@cache
def chain(module):
    """Return the longest chain of imports from a module through modules of its package."""
    longest = ()
    for name, _ in imports(module, MODULES[module].read_text()):
        inside = name in MODULES and name not in FACADES and package(name) == package(module)
        if inside and name != module:
            longest = max(longest, chain(name), key=len)
    return (module, *longest)


@cache
def siblings(name):
    """Return the modules and sub-packages of its own package that one of them imports."""
    inside = [module for module in MODULES if (module + ".").startswith(name + ".")]
    found = set()
    for module in inside:
        for other, _ in imports(module, MODULES[module].read_text()):
            top = ".".join(other.split(".")[:3])
            sibling = package(other) == package(name) and other.count(".") > 1 and top != name
            if sibling and top not in FACADES - PACKAGES:
                found.add(top)
    return frozenset(found)


def sibling_chain(name):
    return (name, *max((sibling_chain(other) for other in siblings(name)), key=len, default=()))


def docstrings(source):
    """Yield the first and the last line of every docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            yield node.body[0].lineno, node.body[0].end_lineno


def code_and_comments(source):
    """Return the numbers of lines of code, without docstrings, and of lines with a comment."""
    code, comments = set(), set()
    empty = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            # Instructions to tools are no comments.
            if not re.search("noqa|type: ignore|fmt: ", token.string):
                comments.add(token.start[0])
        elif token.type not in empty:
            code.update(range(token.start[0], token.end[0] + 1))
    for first, last in docstrings(source):
        code -= set(range(first, last + 1))
    return len(code), len(comments)


def bodies(source):
    """Yield each function with the number of lines of its body, without the docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, body[-1].end_lineno - body[0].lineno + 1 if body else 0


def exported(name):
    return set(getattr(importlib.import_module(name), "__all__", ()))


def test_every_package_has_a_rank():
    assert {package(name) for name in MODULES} - {"", "__main__", "_version"} == set(RANKS)


@pytest.mark.parametrize("module", sorted(set(MODULES) - EXEMPT))
def test_imports_respect_layers_and_borders(module):
    source = MODULES[module].read_text()
    assert not [*layer_breaches(module, source), *border_breaches(module, source)]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ritz._core.checks", "import ritz.operators"),
        ("ritz._core.checks", "from ritz import operators"),
        ("ritz._core.checks", "import ritz"),
        ("ritz.operators._base", "from ritz.operators import DenseOperator\nimport pandas"),
        ("ritz.spectra._cg", "def f():\n    from ritz.testing import wigner"),
        ("ritz.plots._spectra", "import ritz.studies._protocol"),
        ("ritz.studies._protocol", "from ritz.cli import train"),
        ("ritz.measures._noise", "from ritz.optim import Gadam"),
    ],
)
def test_a_breach_of_the_layers_is_detected(module, source):
    assert list(layer_breaches(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ritz.measures._noise", "from ritz.spectra._lanczos import lanczos"),
        ("ritz.measures._noise", "from ritz.spectra import _traces"),
        ("ritz.measures._noise", "import ritz.spectra._traces"),
        ("ritz.spectra._traces", "from ritz.spectra._lanczos.spectrum import lanczos"),
        ("ritz.cli.train", "from ritz.curvature._shared import Adapter"),
    ],
)
def test_a_breach_of_a_border_is_detected(module, source):
    assert list(border_breaches(module, source))


def test_every_shared_name_is_used_by_another_package():
    used = {pair for name, path in MODULES.items() for pair in imports(name, path.read_text())}
    for module in sorted(name for name in MODULES if name.endswith("._shared")):
        names = {name for name in vars(importlib.import_module(module)) if name[0] != "_"}
        assert names == {name for source, name in used if source == module}, module


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda p: p.name)
def test_examples_use_public_names_only(path):
    assert "ritz._" not in path.read_text()
    assert not list(border_breaches("examples", path.read_text()))


def test_tests_import_public_names_from_the_package():
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name, taken in imports(str(path), path.read_text()):
            inside = name.startswith("ritz.") and "._" in name and package(name) != "_core"
            if inside and taken in exported(f"ritz.{package(name)}"):
                wrong.append(f"{path.relative_to(ROOT)} takes {taken} from {name}")
    assert not wrong


@pytest.mark.parametrize("name", TOP_PACKAGES)
def test_chains_of_imports_inside_a_package_are_short(name):
    modules = [module for module in set(MODULES) - FACADES if package(module) == package(name)]
    longest = max((chain(module) for module in modules), key=len)
    assert len(longest) <= LONGEST_CHAIN, " > ".join(longest)
    across = max((sibling_chain(".".join(module.split(".")[:3])) for module in modules), key=len)
    assert len(across) <= LONGEST_CHAIN, " > ".join(across)


@pytest.mark.parametrize("name", TOP_PACKAGES)
def test_modules_are_private_unless_they_are_exported(name):
    if name in ("ritz.cli", "ritz.studies"):  # commands and studies are found by file name
        return
    public = {found.name for found in pkgutil.iter_modules([str(SOURCE / package(name))])}
    assert {module for module in public if not module.startswith("_")} <= exported(name)


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_no_module_has_the_name_of_an_exported_function(name):
    module = importlib.import_module(name)
    names = {found.name for found in pkgutil.iter_modules(module.__path__)}
    public = {name for name in dir(module) if not name.startswith("_")}
    assert not {name for name in names & public if not inspect.ismodule(getattr(module, name))}


def test_files_and_functions_are_short():
    sources = {name: path.read_text() for name, path in MODULES.items()}
    lengths = {name: source.count("\n") for name, source in sources.items()}
    functions = {
        f"{name}.{function}": length
        for name, source in sources.items()
        for function, length in bodies(source)
    }
    assert not {name for name, length in lengths.items() if length > LONGEST_FILE}
    assert not {name for name, length in functions.items() if length > LONGEST_BODY}


def test_every_package_has_comments():
    code, comments = Counter(), Counter()
    for name, path in MODULES.items():
        lines, remarks = code_and_comments(path.read_text())
        code[package(name)] += lines
        comments[package(name)] += remarks
    for name in set(code) - {"", "__main__", "_version"}:
        assert 100 * comments[name] >= FEWEST_COMMENTS * code[name], name


def test_every_file_that_the_documentation_names_exists():
    for page in (ROOT / "docs").glob("*.md"):
        paths = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()))
        missing = {
            path
            for path in paths
            if not any((top / path).is_file() for top in (ROOT, SOURCE, SOURCE.parent))
        }
        assert not missing, page.name


def test_the_number_of_public_names_is_limited():
    top = set(ritz.__all__)
    everywhere = {
        id(getattr(importlib.import_module(name), public))
        for name in ["ritz", *TOP_PACKAGES]
        for public in exported(name)
    }
    assert len(top) <= 45
    assert len(everywhere) <= 275
