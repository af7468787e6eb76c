"""Find what is damaged, missing or unknown below results/ and state/, and remove what is damaged.

Every file is checked against what lists it: a sidecar, a training's outcome, a checkpoint's
progress, or its own seal.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.progress import Progress

from expertflow.chain import STAGES
from expertflow.config.code_digest import rule_digest
from expertflow.core.errors import DataError, single_line
from expertflow.core.files import remove, sha256_file, sidecar_of, write_text
from expertflow.core.format import gb
from expertflow.core.locks import EXPERT_LOCKS, try_lock
from expertflow.core.records import read_part, read_record, unseal
from expertflow.core.sidecars import SIDECARS, Sidecar, record_of
from expertflow.rental.bundle.records import OPENED
from expertflow.staging.store import hash_files
from expertflow.train.saved.checkpoint_files import TENSORS, Contents, find_damage

INDEX = Path("results/index.json")
# Records that contain their own hash.
SEALED = (
    "results/*/logs/*.attempts.json", "results/*/.bundle/opened.json", "state/hashes.json",
    "state/.guard/ledger.json", "state/.tuning/*.json", "state/*/*/outcome.json",
    "state/*/*/plan.json", "state/*/*/attempts.json",
)  # fmt: skip
KILLED = "left by a killed job; make prune removes it"
HISTORIES = ("state/.evaluations/*.jsonl",)
# Files that nothing is made from, that are checked when opened, or that a training writes until it
# ends.
UNNAMED = (
    "results/logs/*", "results/*/logs/*.log", "*/.snakemake_timestamp", "results/*/.bundle/*",
    "results/*/bundle.tar", "results/guard.json", "state/code.json", "state/.*/*.lock",
    "state/.guard/*", "state/*/lock", "state/*/*/lock", "state/*/*/memory.json",
    "state/*/*/diverged.txt", "state/*/*/*.jsonl", "state/*/*/monitor.json",
    "state/*/*/preflight.json", "state/*/*/profile/*", "state/*/*/final/*",
    "state/*/*/expertflow-*/*",
)  # fmt: skip


class Problem(NamedTuple):
    """``removable`` is what to remove so that the file is made again."""

    path: Path
    kind: Literal["damaged", "missing", "unknown"]
    reason: str
    removable: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return single_line(f"{self.path}: {self.kind}, {self.reason}")


class Check(NamedTuple):
    """``find`` reads ``paths`` and returns a problem or null."""

    paths: tuple[Path, ...]
    find: Callable[[], Problem | None] = lambda: None

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths if path.is_file())


def find_problems(folder: Path) -> tuple[list[Problem], str]:
    """Change to a folder and read all of its results and state; return problems and a summary."""
    if not (folder / "results").is_dir():
        raise DataError(f"{folder.absolute()}: contains no results/; choose the folder that does")
    # Sidecars name files relative to the folder of results/ and state/.
    os.chdir(folder)
    checks = list_checks()
    n_bytes = sum(check.n_bytes for check in checks)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=n_bytes)
        problems = []
        for check in checks:
            if (problem := check.find()) is not None:
                problems.append(problem)
            bar.advance(task, check.n_bytes)
    kinds = Counter(problem.kind for problem in problems)
    counts = [f"{kinds[kind]} {kind}" for kind in ("damaged", "missing", "unknown") if kinds[kind]]
    return problems, f"{len(checks)} files read, {gb(n_bytes, 3)}: {', '.join(counts) or 'intact'}"


def describe_other_code() -> list[str]:
    """Return one line on the records that another version of the code made, if there are any."""
    found = []
    for path in sorted(Path("results").rglob(SIDECARS)):
        with suppress(DataError, OSError):
            made = read_record(Sidecar, path)
            if made.rule in STAGES and made.code != rule_digest(made.rule):
                found.append(record_of(path))
    fix = "a dry run lists what a run would make again"
    return [f"records made by other code: {len(found)}, first {found[0]}; {fix}"] if found else []


def list_checks() -> list[Check]:
    """List the checks of all files below the working directory, except those being made."""
    busy = {path.name for path in Path("results").glob("*") if _is_busy(path.name)}
    files = {
        path
        for folder in ("results", "state")
        for path in Path(folder).rglob("*")
        if not path.is_dir() and path.parts[1] not in busy
    }
    checks = [check for path in sorted(files) for check in _checks_by(path)]
    # Files that no record lists were left over, or put there by hand.
    named = {path for check in checks for path in check.paths}
    for path in sorted(files - named):
        is_partial = any(part.endswith(".partial") for part in path.parts)
        # Opening a bundle checked its weights against model.json; no record lists them.
        came = path.parts[2:3] == ("base_model",) and Path(*path.parts[:2], OPENED).is_file()
        is_expected = came or _is_like(path, UNNAMED)
        if not (is_expected or (is_partial and busy)):
            why = KILLED if is_partial else "no record lists it"
            checks.append(Check((path,), partial(Problem, path, "unknown", why)))
    return checks


def _is_busy(expert: str) -> bool:
    lock = EXPERT_LOCKS / f"{expert}.lock"
    if not lock.is_file():
        return False
    # Whoever only verifies may not be able to write here.
    with lock.open("rb") as stream:
        return try_lock(stream, shared=True) == "held"


def _is_like(path: Path, patterns: tuple[str, ...]) -> bool:
    # A * crosses slashes here: results/*/.bundle/* is every file of a bundle.
    return any(fnmatch(path.as_posix(), pattern) for pattern in patterns)


def _checks_by(path: Path) -> Iterator[Check]:
    """Yield the checks of what a file lists, and of itself if it is sealed."""
    if fnmatch(path.name, SIDECARS):
        yield from _by_sidecar(path)
    elif _is_like(path, SEALED):
        yield Check((path,), partial(_check_seal, path))
        if path.name == "outcome.json":
            yield from _by_outcome(path)
    elif _is_like(path, HISTORIES):
        yield Check((path,), partial(_check_lines, path))
    elif path.name == "progress.json" and path.parent.parent.name == "checkpoints":
        paths = (path, *(path.with_name(name) for name in TENSORS))
        yield Check(paths, partial(_check_checkpoint, path.parent))


def _by_sidecar(path: Path) -> Iterator[Check]:
    record = record_of(path)
    unit = (record, path) if path.is_relative_to("results") else (record.parent,)
    try:
        sidecar = read_record(Sidecar, path)
    except (DataError, OSError) as error:
        yield Check((path, record), partial(Problem, path, "damaged", _reason_of(error), unit))
        return
    yield Check((path,))
    is_opened = Path(*path.parts[:2], OPENED).is_file()
    for name, sha256 in {record.name: sidecar.sha256, **sidecar.files}.items():
        file = record.parent / name
        # A bundle leaves out what is no longer needed; files elsewhere are the user's.
        if (file.exists() or not is_opened) and not Path(name).is_absolute():
            yield _by_hash(file, sha256, record, unit, sha256_file)


def _reason_of(error: Exception) -> str:
    # "file: what is wrong; what to do" -> "what is wrong", since the file is printed anyway.
    return str(error).partition(": ")[2].rpartition("; ")[0] or str(error)


def _by_outcome(outcome: Path) -> Iterator[Check]:
    state = outcome.parent
    try:
        files: Contents = read_part(Contents, outcome, "files")
    except (DataError, OSError):
        # The check of its seal reports it.
        return
    for name, digest in files["xxh3"].items():
        top = state / Path(name).parts[0]
        # With its folder: half of final/ is not a model.
        yield _by_hash(state / name, digest, outcome, (outcome, top), _hash_of_state)


def _hash_of_state(path: Path) -> str:
    return hash_files(path.parent, [path.name])[path.name]


def _by_hash(
    path: Path, digest: str, record: Path, unit: tuple[Path, ...], hash_file: Callable[[Path], str]
) -> Check:
    by = "its sidecar" if path == record else str(record)

    def find() -> Problem | None:
        if not path.is_file():
            exists = path.exists()
            reason = f"{by} lists a file" if exists else f"{by} lists it"
            return Problem(path, "damaged" if exists else "missing", reason, (*unit, path))
        try:
            if hash_file(path) == digest:
                return None
            reason = f"does not match {by}"
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        return Problem(path, "damaged", reason, (*unit, path))

    return Check((path,), find)


def _check_seal(path: Path) -> Problem | None:
    try:
        read_record(dict[str, Any], path)
    except (DataError, OSError) as error:
        # A repair must not forget what was spent.
        removable = () if path.name == "ledger.json" else (path,)
        return Problem(path, "damaged", _reason_of(error), removable)
    return None


def _check_lines(path: Path) -> Problem | None:
    n_lines, n_intact = len(path.read_bytes().splitlines()), len(_intact_lines(path))
    if n_intact == n_lines:
        return None
    return Problem(path, "damaged", f"{n_lines - n_intact} of {n_lines} lines")


def _intact_lines(path: Path) -> list[str]:
    found = []
    for line in path.read_bytes().splitlines():
        try:
            unseal(json.loads(line))
        except ValueError:
            continue
        found.append(line.decode())
    return found


def _check_checkpoint(folder: Path) -> Problem | None:
    reason = find_damage(folder, contents=TENSORS)
    return None if reason is None else Problem(folder, "damaged", reason, (folder,))


def repair(problems: list[Problem], *, dry_run: bool = False) -> list[Path]:
    """Remove damaged files, and reports made with them, so that the next run makes them again.

    Return what was removed. A history loses only its damaged lines; a state in use stays.
    """
    for problem in problems:
        if _is_like(problem.path, HISTORIES) and not dry_run:
            lines = _intact_lines(problem.path)
            write_text(problem.path, "".join(f"{line}\n" for line in lines))
    found = [path for problem in problems for path in problem.removable if not _is_in_use(path)]
    experts = sorted({path.parts[1] for path in found if path.is_relative_to("results")})
    # A report describes what is removed: it must be made again, as must the page of all experts.
    reports = [Path("results", expert, "report.json") for expert in experts]
    for report in (*reports, INDEX) if experts else ():
        found += [report, sidecar_of(report), report.with_suffix(".html")]
    existing = [path for path in dict.fromkeys(found) if path.exists() or path.is_symlink()]
    for path in existing if not dry_run else ():
        remove(path)
    return existing + [problem.path for problem in problems if _is_like(problem.path, HISTORIES)]


def _is_in_use(path: Path) -> bool:
    lock = Path(*path.parts[:3], "lock")
    if path.parts[0] != "state" or not lock.is_file():
        return False
    with lock.open("a") as stream:
        return try_lock(stream) == "held"
