"""What the sources of this project import, read from the sources themselves."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

LINKED = ("serving", "converters", "protos", "loadtest")  # imported as beamline.serving, ...


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_file(module: str, root: Path) -> Path | None:
    """By the folders themselves: `beamline.serving` is a link to `serving`."""
    names = module.split(".")
    base = root.joinpath(*(names[1:] if names[0] == "beamline" and names[1:2] and names[1] in LINKED else names))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def imported(node: ast.stmt, path: Path, root: Path) -> Iterator[str]:
    """The modules that one statement names; `from a import b` gives `a.b` where that is a module of ours."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = path.relative_to(root).parts
            package = (("beamline", *parts) if parts[0] in LINKED else parts)[: -node.level]
            base = ".".join([*package, *filter(None, [base])])
        for alias in node.names:
            submodule = f"{base}.{alias.name}"
            yield submodule if module_file(submodule, root) else base


def all_imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in imported(node, path, root))


def run_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that importing a module executes: not functions, not `if TYPE_CHECKING`."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from run_on_import(node.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from run_on_import(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from run_on_import(handler.body)


def import_closure(module: str, root: Path) -> dict[str, str]:
    """Everything that importing `module` imports through our own files: name -> who asked for it."""

    def on_import(path: Path) -> Iterator[str]:
        for node in run_on_import(ast.parse(path.read_text(encoding="utf-8")).body):
            yield from imported(node, path, root)

    return _closure([module], root, on_import)


def source_closure(modules: Iterable[str], root: Path) -> dict[str, Path]:
    """Our own files that `modules` can ever execute, imports inside functions followed too: name -> file."""
    closure = _closure(modules, root, lambda path: (name for _, name in all_imports(path, root)))
    files = {name: module_file(name, root) for name in closure}
    return {name: file for name, file in files.items() if file is not None}


def _closure(modules: Iterable[str], root: Path, imports_of: Callable[[Path], Iterator[str]]) -> dict[str, str]:
    asked = dict.fromkeys(modules, "the test")
    waiting = list(asked)
    while waiting:
        name = waiting.pop()
        path = module_file(name, root)
        if path is None:
            continue
        parents = [name.rsplit(".", 1)[0]] if "." in name else []
        for found in [*parents, *imports_of(path)]:
            if found not in asked:
                asked[found] = name
                waiting.append(found)
    return asked
