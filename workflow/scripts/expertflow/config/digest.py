"""Digest the code behind a script, so that a changed line reruns what it made and nothing else.

A digest covers the script and every project module it imports, directly or not. It is taken over
syntax trees without docstrings: comments, blank lines and time stamps do not count. Modules that a
script loads by name at run time are left out on purpose; whoever does that locks them elsewhere.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path

PACKAGE = "expertflow"


def code_digest(script: Path, *, extra: tuple[Path, ...] = ()) -> str:
    """Hash a script with all project modules it imports, and ``extra`` files byte by byte."""
    root = script.parent
    digest = hashlib.sha256()
    for path in sorted(reachable(script, root)):
        digest.update(f"{path.relative_to(root).as_posix()}\n{_tree(path)[0]}\n".encode())
    for path in sorted(extra):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def module_digest(module: str, root: Path) -> str:
    """Hash one module, given by its dotted name, with the project modules it imports."""
    path = _module_path(module, root)
    if path is None:
        raise FileNotFoundError(module)
    parts = [
        f"{p.relative_to(root).as_posix()}\n{_tree(p)[0]}" for p in sorted(reachable(path, root))
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def reachable(path: Path, root: Path) -> set[Path]:
    """Give the file and all project files that it imports, however far away."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            found = (_module_path(name, root) for name in _tree(current)[1])
            waiting += [p for p in found if p is not None]
    return seen


@cache
def _tree(path: Path) -> tuple[str, tuple[str, ...]]:
    """Give a module's canonical code and the dotted names that it might import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: list[str] = []
    for node in ast.walk(tree):
        _drop_docstring(node)
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    ours = tuple(sorted({name for name in names if name.split(".")[0] == PACKAGE}))
    return ast.dump(tree), ours


def _drop_docstring(node: ast.AST) -> None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            if isinstance(first.value.value, str):
                node.body = node.body[1:]


@cache
def _module_path(name: str, root: Path) -> Path | None:
    path = root.joinpath(*name.split(".")).with_suffix(".py")
    return path if path.is_file() else None
