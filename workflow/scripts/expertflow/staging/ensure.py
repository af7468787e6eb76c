"""Have rows and weights where they are read fastest, verified, for as long as they are read."""

import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import DataError, ExpertflowError, HardwareError
from expertflow.core.records import Record
from expertflow.staging.content import Content, read_content, weights_key
from expertflow.staging.place import choose, note_in_place
from expertflow.staging.records import Staged, StageSpec, StagingRecord

log = logging.getLogger(__name__)


class Places(Record, frozen=True, kw_only=True):
    """Where to read rows and weights from, and how that came about."""

    rows: Path
    weights: Path
    staged: tuple[Staged, ...]


def plan_staging(*, expert: str, spec: StageSpec, rows: Content, weights: Content) -> StagingRecord:
    """Stage rows and weights on this machine, and record what was done.

    Raises:
        HardwareError: the directory that is set cannot be used.
        DataError: a source is not what its manifest says.
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
    before = [record.rows, record.weights] if with_rows else [record.weights]
    if weights_sha256 is not None:
        key = weights_key(Path(record.weights.source), weights_sha256)
        before[-1] = replace(record.weights, key=key)
    notes: list[Staged] = []
    with ExitStack() as holds:
        for old in before:
            content = read_content(old.kind, Path(old.source), old.key)
            promised = sum(map(_memory_bytes, notes))
            try:
                note = _stage(content, record.spec, holds, recorded=old, promised_bytes=promised)
            except HardwareError as error:
                # The directory that is set is there where staging was planned, and not here.
                note = _fall_back(note_in_place(content, str(error)), str(error))
            if note.action == "pre_read":
                paths = [content.source / name for name in content.sizes]
                # Beside what goes on meanwhile.
                threading.Thread(target=_will_need, args=(paths,), daemon=True).start()
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
    content: Content,
    spec: StageSpec,
    holds: ExitStack,
    *,
    recorded: Staged | None = None,
    promised_bytes: int = 0,
) -> Staged:
    """Choose a place for content and have it there; ``holds`` keeps the copy."""
    scratch, note = choose(content, spec, recorded=recorded, promised_bytes=promised_bytes)
    if scratch is None:
        return note
    # Here, as it takes longer to import than it takes to find that nothing is to be copied.
    from expertflow.staging.store import NotStagedError, ensure_staged, open_store

    try:
        copy = ensure_staged(content, open_store(scratch))
    except NotStagedError as problem:
        return _fall_back(note, str(problem))
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"{what}, though there seemed to be room"
        return _fall_back(note, f"{scratch}: {what}")
    holds.enter_context(copy.hold)
    return replace(
        note,
        action="copied" if copy.seconds else "reused",
        target=str(copy.folder),
        n_bytes_copied=content.n_bytes if copy.seconds else 0,
        copy_bytes_per_s=content.n_bytes / copy.seconds if copy.seconds else None,
    )


def _fall_back(note: Staged, reason: str) -> Staged:
    log.warning("%s are read where they are: %s", note.kind, reason)
    return replace(note, reason=reason, is_fallback=True)


def _memory_bytes(note: Staged) -> int:
    return note.n_bytes if note.action == "pre_read" else 0


def _will_need(paths: list[Path]) -> None:
    """Ask the kernel to read files into memory."""
    for path in paths:
        try:
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            log.info("%s: not read beforehand (%s)", path, error.strerror)


def _check_there(note: Staged) -> None:
    """Raise HardwareError if what was read went away, as the scratch of a job does at its end."""
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
