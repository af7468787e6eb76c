"""Digest the code behind a script, so that a changed line reruns what it made and nothing else.

A digest covers the script and every project module it imports, directly or not. It is taken over
syntax trees without docstrings: comments, blank lines and time stamps do not count. Modules that a
script loads by name at run time are left out on purpose; whoever does that locks them elsewhere.
"""

import ast
import contextlib
import gc
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from expertflow.core.files import sha256_text, write_text

PACKAGE = "expertflow"
# Entries that are kept: several versions of all modules.
MAX_KNOWN = 4000
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_digest(script: Path, *, extra: tuple[Path, ...] = ()) -> str:
    """Hash a script with all project modules it imports, and ``extra`` files byte by byte."""
    digest = hashlib.sha256()
    for path in sorted(extra):
        digest.update(path.read_bytes())
    return _hash_modules(reachable(script, script.parent), script.parent, digest)


def module_digest(module: str, root: Path) -> str:
    """Hash one module, given by its dotted name, with the project modules it imports."""
    path = _module_path(module, root)
    if path is None:
        raise FileNotFoundError(module)
    return _hash_modules(reachable(path, root), root, hashlib.sha256())


def reachable(path: Path, root: Path) -> set[Path]:
    """Give the file and all project files that it imports, however far away."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            found = (_module_path(name, root) for name in _read_module(current).imports)
            waiting += [p for p in found if p is not None]
    return seen


def _hash_modules(paths: set[Path], root: Path, digest: "hashlib._Hash") -> str:
    for path in sorted(paths):
        digest.update(
            f"{path.relative_to(root).as_posix()}\n{_read_module(path).sha256}\n".encode()
        )
    parsed_modules.save()
    return digest.hexdigest()[:16]


class _Module(NamedTuple):
    """What counts of a module: the hash of its code, and the dotted names that it might import."""

    sha256: str
    imports: tuple[str, ...]


class ParsedModules:
    """Modules by the hash of their bytes, kept in a file: parsing all of them takes half a second.

    Whatever is in a module decides its key, so an entry is never out of date.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._known: dict[str, Any] = {}
        self._is_saved = True

    def keep_in(self, file: Path) -> None:
        """Take what an earlier process left in a file, and let ``save`` write there."""
        self._file = file
        with contextlib.suppress(OSError, ValueError):
            self._known = {**json.loads(file.read_bytes()), **self._known}

    def read(self, path: Path) -> _Module:
        """Return what counts of a file's code."""
        source = path.read_bytes()
        key = hashlib.sha256(source).hexdigest()
        if key not in self._known:
            self._known[key] = _parse(source)
            self._is_saved = False
        sha256, imports = self._known[key]
        return _Module(sha256, tuple(imports))

    def save(self) -> None:
        """Write what was learned, for the next process."""
        if self._file is not None and not self._is_saved:
            newest = list(self._known.items())[-MAX_KNOWN:]
            # Where nothing can be written, the next process parses again.
            with contextlib.suppress(OSError):
                write_text(self._file, json.dumps(dict(newest)))
            self._is_saved = True


parsed_modules = ParsedModules()


@cache
def _read_module(path: Path) -> _Module:
    return parsed_modules.read(path)


def _parse(source: bytes) -> _Module:
    parts: list[str] = []
    names: set[str] = set()
    # A tree has no cycles, and looking for some among all its nodes takes longer than parsing.
    collects = gc.isenabled()
    gc.disable()
    try:
        _visit(ast.parse(source), parts, names)
    finally:
        if collects:
            gc.enable()
    ours = tuple(sorted(name for name in names if name.split(".")[0] == PACKAGE))
    return _Module(sha256_text("\n".join(parts)), ours)


def _visit(node: ast.AST, parts: list[str], names: set[str]) -> None:
    """Append a node's type and fields, without docstrings, and note what it imports."""
    kind = node.__class__
    parts.append(kind.__name__)
    if kind is ast.Import:
        names.update(alias.name for alias in cast(ast.Import, node).names)
    elif kind is ast.ImportFrom and (module := cast(ast.ImportFrom, node).module):
        names.add(module)
        names.update(f"{module}.{alias.name}" for alias in cast(ast.ImportFrom, node).names)
    for name in kind._fields:
        value = getattr(node, name)
        if isinstance(value, list):
            if name == "body" and kind in _DOCUMENTED and _is_docstring(value[:1]):
                value = value[1:]
            parts.append(f"[{len(value)}")
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, ast.AST):
                _visit(item, parts, names)
            else:
                parts.append(repr(item))


def _is_docstring(body: list[ast.stmt]) -> bool:
    first = body[0] if body else None
    is_constant = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return is_constant and isinstance(cast(Any, first).value.value, str)


@cache
def _module_path(name: str, root: Path) -> Path | None:
    path = root.joinpath(*name.split(".")).with_suffix(".py")
    return path if path.is_file() else None
