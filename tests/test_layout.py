"""The shape of the source tree: who imports whom, how long things get, what is public.

Everything but the checks of the imported package reads the source with `ast`: a module that does not import is
checked all the same.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fxckpt"

# The pipeline's order. A module imports only from its own folder and from those before it.
ORDER = (
    "errors",
    "config",
    "graph",
    "torch_private",
    "capture",
    "decide",
    "rewrite",
    "runtime",
    "record",
    "pipeline",
    "show",
    "use",
    "predict",
    "inspection",
    "planning",
    "transform",
    "__init__",
    # The command line comes last: it uses the public names, and nothing uses it.
    "models",
    "bench",
    "cli",
    "__main__",
)
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

# torch._ops.OpOverload is the class of every operator in a graph, and has no other name.
WITHOUT_PUBLIC_NAME = {"_ops"}

MODULES = sorted(PACKAGE.rglob("*.py"))
every_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def dotted_name(path: Path) -> list[str]:
    """The parts of a module's name: fxckpt/capture/regions.py -> ['fxckpt', 'capture', 'regions']."""
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def folder(parts: list[str]) -> str:
    """The entry of ORDER that a module belongs to."""
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and absolute dotted target of every import of a module, those inside functions included.

    `from a import b` gives a.b, whether b is a module or a name in a.
    """
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                package = dotted_name(path) if path.name == "__init__.py" else dotted_name(path)[:-1]
                base = package[: len(package) - node.level + 1] + base
            yield from ((node.lineno, [*base, alias.name]) for alias in node.names)


def imported_folder(target: list[str]) -> str:
    """The entry of ORDER that an import of fxckpt reaches; a name of the package itself is in `__init__`."""
    name = folder(target)
    is_module = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
    return name if is_module else "__init__"


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, without its decorators and its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def spelled_meta_keys(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every literal key used on something's `.meta`: x.meta["k"], x.meta.get("k"), "k" in x.meta."""

    def is_meta(node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "meta"

    def literal(node: ast.expr) -> str | None:
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Subscript) and is_meta(node.value):
            key = literal(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            if node.func.attr in {"get", "pop", "setdefault"} and node.args:
                key = literal(node.args[0])
        elif isinstance(node, ast.Compare) and any(is_meta(side) for side in node.comparators):
            key = literal(node.left)
        if key is not None:
            yield node.lineno, key


def private_torch(path: Path) -> Iterator[tuple[int, str]]:
    """Every use of a private module of torch: imported, or reached as torch._name."""
    for line, target in imports(path):
        if target[0] == "torch" and len(target) > 1 and target[1].startswith("_"):
            yield line, ".".join(target)
    for node in ast.walk(parse(path)):
        is_torch = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
        if is_torch and node.attr.startswith("_") and node.attr not in WITHOUT_PUBLIC_NAME:
            yield node.lineno, f"torch.{node.attr}"


def test_there_is_a_package_to_check() -> None:
    assert MODULES, f"no modules under {PACKAGE}"
    assert (PACKAGE / "py.typed").is_file(), "without fxckpt/py.typed type checkers ignore fxckpt's annotations"


@every_module
def test_imports_follow_the_pipeline(path: Path) -> None:
    own = folder(dotted_name(path))
    assert own in ORDER, f"{own} has no place in the pipeline: put it into ORDER of {Path(__file__).name}"
    wrong = [
        f"line {line}: {'.'.join(target)}"
        for line, target in imports(path)
        if target[0] == "fxckpt" and ORDER.index(imported_folder(target)) > ORDER.index(own)
    ]
    assert not wrong, f"{own} may import only {', '.join(ORDER[: ORDER.index(own)]) or 'nothing'} of fxckpt: {wrong}"


@every_module
def test_transformers_is_not_imported(path: Path) -> None:
    wrong = [f"line {line}" for line, target in imports(path) if target[0] == "transformers"]
    assert not wrong, f"recognise transformers' classes by name, without importing it: {wrong}"


@every_module
def test_modules_and_functions_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_MODULE_LINES, f"{lines} lines, more than {MAX_MODULE_LINES}"
    functions = (n for n in ast.walk(parse(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    long = [f"{f.name} (line {f.lineno}): {own_lines(f)} lines" for f in functions if own_lines(f) > MAX_FUNCTION_LINES]
    assert not long, f"functions of more than {MAX_FUNCTION_LINES} lines without their docstring: {long}"


@every_module
def test_only_graph_spells_meta_keys(path: Path) -> None:
    if path != PACKAGE / "graph" / "meta.py":
        keys = [f"line {line}: {key!r}" for line, key in spelled_meta_keys(parse(path))]
        assert not keys, f"give these keys of node.meta a name or a function in graph/meta.py: {keys}"


@every_module
def test_only_torch_private_uses_private_torch(path: Path) -> None:
    if path.parent != PACKAGE / "torch_private":
        uses = [f"line {line}: {name}" for line, name in private_torch(path)]
        assert not uses, f"reach private parts of torch through fxckpt/torch_private: {uses}"


def test_all_lists_every_public_name_and_each_has_a_docstring() -> None:
    import fxckpt

    public = {
        name
        for name, value in vars(fxckpt).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    listed = [name for name in fxckpt.__all__ if name != "__version__"]
    assert len(listed) == len(set(listed)), "a name stands twice in __all__"
    assert set(listed) == public
    objects = [(name, getattr(fxckpt, name)) for name in listed]
    bare = [name for name, value in objects if (inspect.isclass(value) or callable(value)) and not value.__doc__]
    assert not bare, f"public names without a docstring: {bare}"


@pytest.mark.parametrize(
    ("module", "alone"),
    [
        ("fxckpt", {"transformers", "matplotlib", "typer", "fxckpt.bench", "fxckpt.cli"}),
        ("fxckpt.cli", {"transformers", "matplotlib"}),
    ],
)
def test_importing_leaves_alone_what_only_some_need(module: str, alone: set[str]) -> None:
    code = f"import sys, {module}; sys.exit(', '.join(set(sys.modules) & {alone}) or None)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"import {module} imports {done.stderr}"


# A checker is trusted only after it has caught something broken on purpose.

BROKEN = {
    "import_order": (
        "errors.py",
        "from fxckpt.decide import plan",
        lambda p: [t for _, t in imports(p)] == [["fxckpt", "decide", "plan"]],
    ),
    "relative_import": (
        "decide/plan.py",
        "from ..rewrite.order import x",
        lambda p: [t for _, t in imports(p)] == [["fxckpt", "rewrite", "order", "x"]],
    ),
    "relative_import_in_package": (
        "decide/__init__.py",
        "from .plan import Plan",
        lambda p: [t for _, t in imports(p)] == [["fxckpt", "decide", "plan", "Plan"]],
    ),
    "import_in_function": (
        "show/tables.py",
        "def f():\n    import transformers.models",
        lambda p: [t for _, t in imports(p)] == [["transformers", "models"]],
    ),
    "meta_keys": (
        "show/tables.py",
        "a.meta['x'], b.meta.get('y', 0), 'z' in c.meta, d.meta[KEY]",
        lambda p: sorted(k for _, k in spelled_meta_keys(parse(p))) == ["x", "y", "z"],
    ),
    "private_torch": (
        "use/hooks.py",
        "import torch._dynamo.config\nfrom torch import _guards\nfrom torch.fx import Graph\nx = torch._C.f()",
        lambda p: sorted(n for _, n in private_torch(p)) == ["torch._C", "torch._dynamo.config", "torch._guards"],
    ),
    "long_function": (
        "graph.py",
        'def f():\n    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * 60,
        lambda p: own_lines(parse(p).body[0]) == 61,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_checks_catch_what_is_broken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, source, caught = BROKEN[name]
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "fxckpt")
    path = tmp_path / "fxckpt" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    assert caught(path)
