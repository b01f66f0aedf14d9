"""Write docs/api, the reference of public names, and docs/modules.md: ``python docs/api.py``."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parent / "src" / "ritz"
# In the order in which a user meets them.
PACKAGES = ["spectra", "operators", "curvature", "measures", "graphs", "optim", "training",
            "plots", "models", "data", "rmt", "testing", "studies"]  # fmt: skip
WIDTH = 100


def pages():
    """Return the text of every page by its path in docs."""
    texts = {f"api/{name}.md": package_page(name) for name in PACKAGES}
    return {"modules.md": module_map(), "api/README.md": front_page()} | texts


def module_map():
    """Return the page that lists every module with the first line of its docstring."""
    packages = sorted(path.parent for path in SOURCE.glob("*/__init__.py"))
    lines = [
        "# Modules",
        "Written by `docs/api.py` from the first lines of the docstrings. Paths are relative to "
        "`src/ritz`. [architecture.md](architecture.md) has the layers and the rules.",
        "## ritz",
        described_modules(path for path in SOURCE.glob("*.py")),
    ]
    for package in packages:
        inner = (path for path in package.rglob("*.py") if path != package / "__init__.py")
        lines += [f"## {package.name}", summary(parse(package / "__init__.py")),
                  described_modules(inner)]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def described_modules(paths):
    """Return a list of modules, each with a link and its first line."""
    return "\n".join(f"- [`{path.relative_to(SOURCE).as_posix()}`]({link(path, '..')}): "
                     f"{summary(parse(path))}" for path in sorted(paths))  # fmt: skip


def front_page():
    """Return the page of the names of ``ritz`` itself, with links to the pages of packages."""
    lines = [
        "# API reference",
        "Written by `docs/api.py` from the docstrings. `help(ritz.lanczos)` prints the complete "
        "docstring of a name: arguments, formulas, cost and references.",
        "## Packages",
        "\n".join(f"- [`ritz.{name}`]({name}.md): {summary(parse(package_file(name)))}"
                  for name in PACKAGES),
        "## Names of `ritz`",
    ]  # fmt: skip
    entries = []
    for name in public_names(""):
        if name in PACKAGES or name.startswith("__"):
            continue
        path, node = find(package_file(""), name)
        package = path.relative_to(SOURCE).parts[0]
        # Only `_core` has no page: its public names are those of `ritz` alone.
        known = package in PACKAGES and name in public_names(package)
        target = f"{package}.md#{name.lower()}" if known else link(path)
        entries.append(f"- [`ritz.{name}`]({target}): {summary(node)}")
    return "\n\n".join([*lines, "\n".join(entries)]) + "\n"


def package_page(package):
    """Return the page of one package."""
    file = package_file(package)
    names = public_names(package)
    parts = [f"# ritz.{package}", summary(parse(file)), "[All packages](README.md)",
             " · ".join(f"[{name}](#{name.lower()})" for name in names)]  # fmt: skip
    for name in names:
        path, node = find(file, name)
        parts += [f"## {name}", *entry(name, path, node)]
    return "\n\n".join(parts) + "\n"


def entry(name, path, node):
    """Return the paragraphs about one name."""
    source = f"[source]({link(path)})"
    if isinstance(node, ast.Module):
        functions = [child for child in node.body if is_public(child)]
        listed = [(f"### {name}.{each.name}", *entry(each.name, path, each)) for each in functions]
        return [f"{summary(node)} {source}", *(part for parts in listed for part in parts)]
    if isinstance(node, ast.FunctionDef):
        return [code(signature(name, node)), f"{summary(node)} {source}"]
    if not isinstance(node, ast.ClassDef):
        types = ast.unparse(node.value.args[1]).replace("'", "")
        return [code(f"{name} = {types}"), f"An alias of types, for annotations. {source}"]
    start = next((child for child in node.body if getattr(child, "name", "") == "__init__"), None)
    head = f"class {name}" if start is None else f"class {signature(name, start)}"
    details = [f"- `{attribute}`: {text}" for attribute, text in attributes(node)]
    for child in filter(is_public, node.body):
        kinds = {ast.unparse(decorator) for decorator in child.decorator_list}
        # Methods of torch that a class overrides have the docstrings of torch.
        if not docstring(child) or any(kind.endswith((".setter", "overload")) for kind in kinds):
            continue
        is_value = kinds & {"property", "cached_property"}
        shown = child.name if is_value else signature(child.name, child, width=None)
        details.append(f"- `{shown}`: {summary(child)}")
    return [code(head), f"{summary(node)} {source}", *(["\n".join(details)] if details else [])]


def signature(name, node, width=WIDTH):
    """Return a function with its arguments, one per line if the line would be longer."""
    arguments = node.args
    listed = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(listed) - len(arguments.defaults)) + arguments.defaults
    words = [word(*pair) for pair in zip(listed, defaults, strict=True)]
    words = words[1:] if listed and listed[0].arg in ("self", "cls") else words
    if arguments.vararg:
        words.append(f"*{word(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        words.append("*")
    words += [word(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        words.append(f"**{word(arguments.kwarg, None)}")
    # The class, not __init__, is named for a class: it has no annotation of what it returns.
    returned = f" -> {written(node.returns)}" if node.returns and name == node.name else ""
    line = f"{name}({', '.join(words)}){returned}"
    inner = "".join(f"    {each},\n" for each in words)
    return line if width is None or len(line) <= width else f"{name}(\n{inner}){returned}"


def word(argument, default):
    """Return an argument with its annotation and default."""
    kind = f": {written(argument.annotation)}" if argument.annotation else ""
    return argument.arg + kind + ("" if default is None else f" = {ast.unparse(default)}")


def written(annotation):
    """Return an annotation without the quotes of names that are defined later."""
    return ast.unparse(annotation).replace("'", "") if annotation else ""


def attributes(node):
    """Yield the names and texts of the section ``Attributes`` of a docstring."""
    section = re.search(r"^Attributes:\n((?: .*\n?|\n)*)", docstring(node), flags=re.MULTILINE)
    for item in re.split(r"\n(?= {4}\S)", section[1].rstrip() if section else ""):
        name, colon, text = item.strip().partition(":")
        if colon:
            yield name, markdown(text)


def summary(node):
    """Return the first paragraph of a docstring."""
    return markdown(docstring(node).partition("\n\n")[0])


def markdown(text):
    """Return reStructuredText as one line of Markdown."""
    text = re.sub(r":math:`([^`]*)`", r"$`\1`$", " ".join(text.split()))
    text = re.sub(r":[a-z]+:`~?([^`]*)`", r"`\1`", text)
    return text.replace("``", "`")


def find(file, name):
    """Return the file and the node that define a name, through any number of re-exports."""
    body = parse(file).body
    # Imports under `if TYPE_CHECKING` as well.
    for child in [each for part in body for each in (part, *getattr(part, "body", []))]:
        if not (isinstance(child, ast.ImportFrom) and child.module.startswith("ritz")):
            continue
        if name in (alias.name for alias in child.names):
            inner = module_file(f"{child.module}.{name}")
            return (inner, parse(inner)) if inner else find(module_file(child.module), name)
    for child in reversed(body):  # overloads come before the function itself
        targets = [getattr(child, "target", None), *getattr(child, "targets", [])]
        if name in [getattr(child, "name", None), *(getattr(each, "id", None) for each in targets)]:
            return file, child
    raise LookupError(f"{file} defines no {name}")


def module_file(module):
    """Return the file of a module or package, or ``None`` if it is neither."""
    path = SOURCE.parent.joinpath(*module.split("."))
    files = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in files if file.exists()), None)


def package_file(package):
    """Return the ``__init__.py`` of a package, or of ``ritz`` itself if the name is empty."""
    return SOURCE / package / "__init__.py"


def public_names(package):
    """Return the names in ``__all__`` of a package."""
    for child in parse(package_file(package)).body:
        if isinstance(child, ast.Assign) and child.targets[0].id == "__all__":
            return ast.literal_eval(child.value)
    raise LookupError(f"{package} has no __all__")


def is_public(node):
    """Return whether a node is a function or class without an underscore."""
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")


def docstring(node):
    """Return the docstring of a node, or an empty text."""
    return ast.get_docstring(node) or "" if hasattr(node, "body") else ""


def code(text):
    """Return a block of Python code."""
    return f"```python\n{text}\n```"


def link(path, root="../.."):
    """Return the address of a source file, relative to a page; ``root`` leads to the repository."""
    return f"{root}/{path.relative_to(SOURCE.parents[1]).as_posix()}"


def parse(path):
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    (FOLDER / "api").mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
