"""Digest the code behind a rule, so that a changed line reruns what it made and nothing else.

A digest covers a script and every project module it imports, directly or not. It is taken over
syntax trees without docstrings: comments, blank lines and time stamps do not count. Modules that
``core.plugins`` finds in a folder count too; a generator, which is loaded by name,
has its own digest, stored in the lock of its source.
"""

import ast
import contextlib
import hashlib
import json
from functools import cache
from pathlib import Path

from expertflow.core.files import sha256_text, write_text

PACKAGE = "expertflow"
# The functions of core.plugins that find modules in a folder.
IN_FOLDERS = ("import_members", "list_modules")
SCRIPTS = Path(__file__).parents[2]
# Entries to keep: several versions of all modules.
MAX_KNOWN = 4000
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
GENERATORS = "expertflow.data.sources.generated"
# Prefix of a generator's name among rules.
GENERATOR = "generator "
# Files that a module reads besides its imports: a change in them is a change of its code.
RESOURCES = {"export/card.py": "export/*.j2", "report/sheet.py": "report/templates/*"}


def rule_digest(rule: str, scripts: Path = SCRIPTS) -> str:
    """Digest a rule's script, all project modules it imports, and their resources byte by byte.

    ``GENERATOR`` plus a name means a generator; FileNotFoundError if there is none.
    """
    digest, library = hashlib.sha256(), scripts / PACKAGE
    folder = scripts.joinpath(*GENERATORS.split(".")) if rule.startswith(GENERATOR) else scripts
    script = folder / f"{rule.removeprefix(GENERATOR)}.py"
    modules = list_imports(script, scripts)
    resources = [name for module, name in RESOURCES.items() if library / module in modules]
    # In a fixed order, because a digest depends on it.
    for path in sorted(path for name in resources for path in library.glob(name)):
        digest.update(path.read_bytes())
    for path in sorted(modules):
        place, (code, _) = path.relative_to(scripts).as_posix(), _read_module(path)
        digest.update(f"{place}\n{code}\n".encode())
    parsed_modules.save()
    return digest.hexdigest()[:16]


def other_code(made_by: dict[str, str]) -> tuple[str, ...]:
    """Return the rules and generators whose code here differs or is missing."""
    found = []
    for name, code in sorted(made_by.items()):
        with contextlib.suppress(FileNotFoundError):
            # A rule that no longer exists differs, too.
            if code == rule_digest(name):
                continue
        found.append(name)
    return tuple(found)


def list_imports(path: Path, root: Path) -> set[Path]:
    """Return a file and all project files that it imports, directly or not."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting += _imported(current, root)
    return seen


# What counts in a module: the hash of its code, and the dotted names that it might import.
Module = tuple[str, list[str]]


class ParsedModules:
    """Modules by the hash of their bytes, cached in a file: parsing all of them takes a second.

    A module's content determines its key, so an entry is never out of date.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._known: dict[str, Module] = {}
        self._is_saved = True

    def keep_in(self, file: Path) -> None:
        self._file = file
        with contextlib.suppress(OSError, ValueError, TypeError):
            # A truncated file is as good as none: everything is parsed again.
            self._known = {**json.loads(file.read_bytes()), **self._known}

    def read(self, path: Path) -> Module:
        source = path.read_bytes()
        key = hashlib.sha256(source).hexdigest()
        if key not in self._known:
            self._known[key] = _parse(source)
            self._is_saved = False
        return self._known[key]

    def save(self) -> None:
        if self._file is not None and not self._is_saved:
            # Dicts keep their order: the oldest entries come first.
            newest = list(self._known.items())[-MAX_KNOWN:]
            # If nothing can be written, the next process parses again.
            with contextlib.suppress(OSError):
                write_text(self._file, json.dumps(dict(newest)))
            self._is_saved = True


parsed_modules = ParsedModules()
_read_module = cache(parsed_modules.read)


def _parse(source: bytes) -> Module:
    tree, names = ast.parse(source), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # ``from a import b``: b is a module or a name in a; what has no file is left out later.
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in IN_FOLDERS:
            names.add(f"{ast.literal_eval(node.args[0])}.*")
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    # Only ours: other packages are pinned in envs/.
    ours = sorted(name for name in names if name.split(".")[0] == PACKAGE)
    return sha256_text(ast.dump(tree)), ours


@cache
def _imported(path: Path, root: Path) -> list[Path]:
    _, names = _read_module(path)
    return [p for name in names for p in _module_paths(name, root)]


@cache
def _module_paths(name: str, root: Path) -> list[Path]:
    # data.checks.sql -> sql.py; with ``data.checks.*`` all modules of that folder.
    *folders, module = name.split(".")
    return sorted(root.joinpath(*folders).glob(f"{module}.py"))
