"""Change one thing in the code, run the tests that should notice, and count the misses.

make mutants                                    all modules, at most 300 mutants each (hours)
python tests/mutants.py packing --sample 40     one module, a smaller sample

A mutant is one operator, constant, condition, argument or statement changed, removed or negated.
Annotations, docstrings, messages and names of type variables stay. Each worker has a copy of
the tree and forks from a process that has imported the libraries, so a mutant costs its tests only.
Survivors without a visible effect are listed in mutants.toml, each with its reason.
"""

import argparse
import ast
import contextlib
import copy
import ctypes
import difflib
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path("workflow/scripts/expertflow")
PYTEST = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
# Limits of a mutant before it is killed: some grow forever.
MEMORY_BYTES = 8 << 30
PR_SET_CHILD_SUBREAPER = 36
SETTINGS = tomllib.loads((ROOT / "tests/mutants.toml").read_text())
OTHER_OPERATOR: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
MESSAGES = {"print", "log", "info", "debug", "warning", "error", "warn", "show"}
TYPES = {"TypeVar", "NewType", "cast"}
# These guard against mistakes and unusual machines, like assertions.
GUARDS = {"strict", "encoding", "frozen", "kw_only"}


class Mutant(NamedTuple):
    path: str
    function: str
    source: str

    def lines(self) -> list[str]:
        """Return the removed and added lines, like a diff."""
        old = (ROOT / self.path).read_text().splitlines()
        diff = difflib.unified_diff(old, self.source.splitlines(), n=0, lineterm="")
        changed = [line for line in list(diff)[2:] if not line.startswith("@@")]
        return [f"{line[0]} {line[1:].strip()}" for line in changed]

    def key(self) -> tuple[str, str]:
        first, *_ = lines = self.lines()
        line = " ".join(line[2:] for line in lines if line[0] == "+")
        # A function may lose several statements or values.
        return self.function, f"{line} for {first[2:]}" if line in ("pass", "return None") else line


def expressions(node: ast.expr) -> Iterator[ast.expr]:
    """Yield replacements for an expression."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare):
        for place, operator in enumerate(other.ops):
            other.ops[place] = OTHER_OPERATOR[type(operator)]()
            yield copy.deepcopy(other)
            other.ops[place] = operator
    elif isinstance(other, ast.BinOp | ast.BoolOp) and type(other.op) in OTHER_OPERATOR:
        other.op = OTHER_OPERATOR[type(other.op)]()
        yield other
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not | ast.USub):
        yield other.operand
    elif isinstance(other, ast.IfExp):
        yield other.body
        yield other.orelse
    elif isinstance(other, ast.Constant):
        if isinstance(other.value, bool):
            yield ast.Constant(not other.value)
        elif isinstance(other.value, int | float):
            yield ast.Constant(other.value + 1)
        elif isinstance(other.value, str) and " " not in other.value:
            yield ast.Constant(other.value + "XX")
    elif isinstance(other, ast.Call):
        if isinstance(other.func, ast.Name) and other.func.id in OTHER_FUNCTION:
            other.func.id = OTHER_FUNCTION[other.func.id]
            if other.func.id != "list" or not other.keywords:
                yield other
        for place, keyword in enumerate(other.keywords):
            if keyword.arg not in GUARDS:
                fewer = copy.deepcopy(node)
                del fewer.keywords[place]  # type: ignore[attr-defined]
                yield fewer


def statements(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield replacements for a statement."""
    if isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and not is_message(node.value)):
        yield ast.Pass()
    elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.AugAssign) and type(node.op) in OTHER_OPERATOR:
        yield ast.AugAssign(node.target, OTHER_OPERATOR[type(node.op)](), node.value)


def is_message(node: ast.AST) -> bool:
    """Distinguish prose and names of types from code."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        return name in MESSAGES | TYPES or name.endswith(("Error", "Reject"))
    return isinstance(node, ast.JoinedStr | ast.Constant)


def mutants(path: str) -> list[Mutant]:
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def add(node: ast.expr | ast.stmt, other: ast.AST, function: str) -> None:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        text = ast.unparse(ast.fix_missing_locations(other))
        if isinstance(node, ast.expr) and not isinstance(other, ast.Constant | ast.Name):
            text = f"({text})"
        changed = (source[:begin] + text.encode() + source[end:]).decode()
        with contextlib.suppress(SyntaxError):
            ast.parse(changed)
            found.append(Mutant(path, function, changed))

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.stmt):
            for other in statements(node):
                add(node, other, function)
        elif isinstance(node, ast.expr):
            for changed in expressions(node):
                add(node, changed, function)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                plain = isinstance(child, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
                if field in ("test", "ifs") and plain and not isinstance(node, ast.While):
                    add(child, ast.UnaryOp(ast.Not(), child), function)
                docstring = isinstance(node, ast.Expr) and isinstance(child, ast.Constant)
                prose = isinstance(child, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom)
                prose |= isinstance(child, ast.Subscript) and ast.unparse(child.value) == "Literal"
                prose |= isinstance(child, ast.keyword) and child.arg in GUARDS
                called = isinstance(child, ast.Call) and is_message(child)
                if isinstance(child, ast.AST) and not (docstring or prose or called):
                    visit(child, function)

    visit(ast.parse(source), "")
    return found


class Worker:
    """A copy of the tree, with forks that run tests in it."""

    def __init__(self, tests: list[str]) -> None:
        self.tests = tests
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Orphans of its forks become its children.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.home = Path(tempfile.mkdtemp())
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            (self.home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.home / name)
        (self.home / ".venv").symlink_to(ROOT / ".venv")
        os.chdir(self.home)
        sys.path.remove(str(ROOT / "tests"))
        # A mutant of the same second and size would be taken for the previously compiled file.
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        # A test that waits in vain fails before its mutant is out of time.
        os.environ["EXPERTFLOW_PATIENCE_S"] = "20"
        sys.dont_write_bytecode = True
        importlib.import_module("pytest")
        self.limit_s = 3600.0
        # Once to see what they import, and once to see how long they take.
        for _ in range(2):
            began_s = time.monotonic()
            if self.run() != "survived":
                output = (self.home / "output.txt").read_text()
                print(f"the tests do not pass as they are:\n{output}", flush=True)
                os._exit(1)
            for library in json.loads((self.home / "libraries.json").read_text()):
                with contextlib.suppress(Exception):
                    importlib.import_module(library)
        self.limit_s = 5 + 5 * (time.monotonic() - began_s)

    def run(self) -> str:
        """Run the tests in a fork, and return how they ended."""
        child = os.fork()
        if child == 0:
            self._run_tests()
        deadline_s, ended = time.monotonic() + self.limit_s, "timeout"
        while ended == "timeout" and time.monotonic() < deadline_s:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                ended = "killed" if status else "survived"
            elif pid == 0:
                time.sleep(0.02)
        # Kill whatever the tests started, also in other sessions.
        while left := psutil.Process().children(recursive=True):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        return ended

    def _run_tests(self) -> NoReturn:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        output = os.open(self.home / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        code = 70
        try:
            code = int(importlib.import_module("pytest").main([*PYTEST, *self.tests]))
            files = {name: getattr(sys.modules[name], "__file__", None) for name in sys.modules}
            libraries = [name for name, file in files.items() if "site-packages" in str(file)]
            (self.home / "libraries.json").write_text(json.dumps(libraries))
        finally:
            os._exit(code)

    def judge(self, mutant: Mutant) -> str:
        """Apply a mutant in the copy, run the tests, and revert it."""
        place = self.home / mutant.path
        place.write_text(mutant.source)
        try:
            return self.run()
        finally:
            shutil.copy(ROOT / mutant.path, place)


def start_worker(tests: list[str]) -> None:
    global worker
    worker = Worker(tests)


def judge(mutant: Mutant) -> str:
    return worker.judge(mutant)


def judge_module(name: str, sample: int, seed: int, workers: int) -> tuple[list[Mutant], list[str]]:
    module = SETTINGS["modules"][name]
    files, tests = module["code"], [f"tests/{test}" for test in module["tests"]]
    tests += ["-k", module["choose"]] if "choose" in module else []
    found = [mutant for file in files for mutant in mutants(str(LIBRARY / file))]
    chosen = random.Random(seed).sample(found, min(sample, len(found)))
    print(f"{name}: {len(chosen)} of {len(found)} mutants", flush=True)
    fork, endings = multiprocessing.get_context("fork"), list[str]()
    with ProcessPoolExecutor(workers, fork, start_worker, (tests,)) as pool:
        for mutant, ended in zip(chosen, pool.map(judge, chosen), strict=True):
            endings.append(ended)
            if ended == "survived" and mutant.key() not in accepted():
                print(
                    f"  {mutant.path} {mutant.function}", *mutant.lines(), sep="\n    ", flush=True
                )
            if len(endings) % 20 == 0:
                print(f"  {len(endings)} of {len(chosen)}", file=sys.stderr, flush=True)
    return chosen, endings


def accepted() -> set[tuple[str, str]]:
    return {(entry["function"], entry["line"]) for entry in SETTINGS.get("accepted", [])}


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "modules", nargs="*", help=f"of {', '.join(SETTINGS['modules'])}; default: all"
    )
    parser.add_argument(
        "--sample", type=int, default=300, help="maximum number of mutants per module"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if unknown := set(arguments.modules) - set(SETTINGS["modules"]):
        parser.error(f"there is no module {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    # Copies and leftovers of tests are removed with it.
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder
        with contextlib.suppress(BrokenExecutor):  # a worker said why
            sys.exit(judge_modules(arguments))
    sys.exit(1)


def judge_modules(arguments: argparse.Namespace) -> bool:
    """Judge modules and print a table; return whether a miss has no accepted reason."""
    rows, missed = [], 0
    for name in arguments.modules or SETTINGS["modules"]:
        chosen, endings = judge_module(name, arguments.sample, arguments.seed, arguments.workers)
        killed, timeouts = endings.count("killed"), endings.count("timeout")
        survivors = [m for m, ended in zip(chosen, endings, strict=True) if ended == "survived"]
        unknown = [mutant for mutant in survivors if mutant.key() not in accepted()]
        percent = 100 * killed / max(killed + len(survivors), 1)
        missed += len(unknown) + (percent < 90)
        row = (name, len(chosen), killed, timeouts, len(survivors), len(unknown), f"{percent:.1f}")
        rows.append(row)
        print(f"  killed {killed}, survived {len(survivors)}, timeout {timeouts}", flush=True)
    head = ("module", "mutants", "killed", "timeout", "survived", "without reason", "percent")
    for row in [head, *rows]:
        print("".join(f"{cell!s:<15}" for cell in row).rstrip())
    print(f"seed {arguments.seed}, at most {arguments.sample} per module")
    return missed > 0


if __name__ == "__main__":
    main()
