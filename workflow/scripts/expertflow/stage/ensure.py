"""Have rows and weights where they are read fastest, verified, for as long as they are read."""

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from expertflow.core.errors import DataError, ExpertflowError, HardwareError
from expertflow.stage.content import Content, read_content, weights_key
from expertflow.stage.place import Choice, choose
from expertflow.stage.records import Kind, Staged, StageSpec, StagingRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Content by the folder that holds it and the key that names it."""

    kind: Kind
    source: Path
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where to read rows and weights from, and how that came about."""

    rows: Path
    weights: Path
    staged: tuple[Staged, ...]


def plan_staging(*, expert: str, spec: StageSpec, rows: Wanted, weights: Wanted) -> StagingRecord:
    """Stage rows and weights on this machine, and say what was done.

    Raises:
        HardwareError: the directory that is set cannot be used.
        DataError: a source is missing, or is not what its manifest says.
    """
    with ExitStack() as holds:
        first = _stage(rows, spec, holds)
        second = _stage(weights, spec, holds, promised_bytes=_memory_bytes(first))
    return StagingRecord(expert=expert, spec=spec, rows=first, weights=second)


@contextmanager
def staged(
    record: StagingRecord, *, weights_sha256: str | None = None, with_rows: bool = True
) -> Iterator[Places]:
    """Stage here what was staged elsewhere or before, and hold it while it is read.

    What cannot be copied is read where it is, which is logged and noted. ``weights_sha256`` is that
    of the model: what lies beside its weights may have changed since. Without rows, as where there
    are none, only weights are looked after.

    Raises:
        HardwareError: what was read is gone; where it is a copy, another run copies again.
        DataError: a source is missing, or is not what its manifest says.
    """
    before = {"rows": record.rows, "weights": record.weights}
    if not with_rows:
        del before["rows"]
    if weights_sha256 is not None:
        key = weights_key(Path(record.weights.source), weights_sha256)
        before["weights"] = replace(record.weights, key=key)
    notes: list[Staged] = []
    with ExitStack() as holds:
        for old in before.values():
            promised = sum(_memory_bytes(note) for note in notes)
            note = _stage_again(old, record.spec, holds, promised_bytes=promised)
            if note.action == "pre_read":
                _pre_read(note)
            notes.append(note)
        places = {note.kind: Path(note.target or note.source) for note in notes}
        try:
            yield Places(
                rows=places.get("rows", Path(record.rows.source)),
                weights=places["weights"],
                staged=tuple(notes),
            )
        except (OSError, ExpertflowError):
            for note in notes:
                _check_there(note)
            raise


def _stage(
    wanted: Wanted,
    spec: StageSpec,
    holds: ExitStack,
    *,
    recorded: Staged | None = None,
    promised_bytes: int = 0,
) -> Staged:
    """Choose a place for content and have it there; ``holds`` keeps the copy."""
    content = _content(wanted)
    choice = choose(content, spec, recorded=recorded, promised_bytes=promised_bytes)
    if choice.scratch is None:
        return _in_place(content, choice)
    # Here, as they take longer to import than it takes to find that nothing is to be copied.
    from expertflow.stage.make import ensure_staged
    from expertflow.stage.store import NotStaged, open_store

    try:
        store = open_store(choice.scratch, spec.quota_gib)
        copy = ensure_staged(content, store)
    except NotStaged as problem:
        return _in_place(content, replace(choice, reason=str(problem)), failed=True)
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"{what}, though there seemed to be room"
        reason = f"{choice.scratch}: {what}"
        return _in_place(content, replace(choice, reason=reason), failed=True)
    holds.enter_context(copy.hold)
    n_copied = content.n_bytes if copy.origin == "copied" else 0
    return replace(
        _in_place(content, choice),
        action=copy.origin,
        target=str(copy.folder),
        n_bytes_copied=n_copied,
        copy_bytes_per_s=n_copied / copy.seconds if n_copied else None,
    )


def _stage_again(old: Staged, spec: StageSpec, holds: ExitStack, *, promised_bytes: int) -> Staged:
    wanted = Wanted(kind=old.kind, source=Path(old.source), key=old.key)
    try:
        return _stage(wanted, spec, holds, recorded=old, promised_bytes=promised_bytes)
    except HardwareError as error:
        # The directory that is set is there where staging was planned, and not here.
        choice = Choice(scratch=None, reason=str(error), file_system=None)
        return _in_place(_content(wanted), choice, failed=True)


def _content(wanted: Wanted) -> Content:
    return read_content(wanted.kind, wanted.source, wanted.key)


def _in_place(content: Content, choice: Choice, *, failed: bool = False) -> Staged:
    if failed:
        log.warning("%s are read where they are: %s", content.kind, choice.reason)
    return Staged(
        kind=content.kind,
        key=content.key,
        source=str(content.source),
        action="pre_read" if choice.pre_read else "read_in_place",
        reason=choice.reason,
        is_fallback=failed,
        target=None,
        n_files=len(content.sizes),
        n_bytes=content.n_bytes,
        n_bytes_copied=None,
        copy_bytes_per_s=None,
        source_file_system=choice.file_system,
        source_read_bytes_per_s=choice.source.bytes_per_s,
        source_read_method=choice.source.method,
        target_read_bytes_per_s=choice.target.bytes_per_s,
        target_read_method=choice.target.method,
    )


def _memory_bytes(note: Staged) -> int:
    return note.n_bytes if note.action == "pre_read" else 0


def _pre_read(note: Staged) -> None:
    """Ask the kernel to read files into memory, beside what goes on meanwhile."""
    content = _content(Wanted(kind=note.kind, source=Path(note.source), key=note.key))
    paths = [content.source / name for name in content.sizes]
    threading.Thread(target=_will_need, args=(paths,), daemon=True).start()


def _will_need(paths: list[Path]) -> None:
    for path in paths:
        try:
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            log.info("%s: not read beforehand (%s)", path, error.strerror)


def _check_there(note: Staged) -> None:
    """Find out whether what was read went away meanwhile.

    Raises:
        HardwareError: it did, as the scratch of a job does that is over.
    """
    place = Path(note.target or note.source)
    try:
        is_there = read_content(note.kind, place, note.key).n_bytes == note.n_bytes
    except (DataError, OSError):
        is_there = False
    if not is_there:
        fix = "put them back and run again" if note.target is None else "run again to copy them"
        raise HardwareError(
            f"{place}: {note.kind} went away while they were read; {fix}, and training goes on"
            " from its last checkpoint"
        )
