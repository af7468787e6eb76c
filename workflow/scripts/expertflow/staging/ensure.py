"""Provide verified rows and weights from the fastest place: as is, from memory, or copied."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import DataError, ExpertflowError, HardwareError, TransientError
from expertflow.core.records import Record, fill_record
from expertflow.hardware import disk
from expertflow.staging.content import Content, read_content, weights_key
from expertflow.staging.records import AUTO, NO_SCRATCH, Staged, StageSpec, StagingRecord

log = logging.getLogger(__name__)

# Local file systems; a copy from these to another disk rarely pays off.
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"}
# Share of free memory for files that stay there once read; the rest is left to training.
MEMORY_SHARE = 0.5
# A copy must be read this much faster than its source to be worth making (judgment).
GAIN = 1.5
SET = "not measured: scratch is set"
SPEEDS = ("source_read_bytes_per_s", "source_read_method",
          "target_read_bytes_per_s", "target_read_method")  # fmt: skip


class Places(Record, frozen=True, kw_only=True):
    rows: Path
    weights: Path
    staged: tuple[Staged, ...]


def plan_staging(*, expert: str, spec: StageSpec, rows: Content, weights: Content) -> StagingRecord:
    notes: list[Staged] = []
    with ExitStack() as holds:
        for content in (rows, weights):
            notes.append(_stage(content, spec, holds, notes))
    return StagingRecord(expert=expert, spec=spec, rows=notes[0], weights=notes[1])


@contextmanager
def open_staged(
    record: StagingRecord, *, weights_sha256: str | None = None, with_rows: bool = True
) -> Iterator[Places]:
    """Repeat recorded staging on this machine, and keep the copies while they are read.

    What cannot be copied is read in place, logged and recorded. ``weights_sha256`` is the model's
    hash, because files next to its weights may have changed. Raises HardwareError if a source
    vanishes, TransientError if a copy does (a rerun copies again), and DataError if a source is
    missing or differs from its manifest.
    """
    before = [record.rows, record.weights] if with_rows else [record.weights]
    if weights_sha256 is not None:
        key = weights_key(Path(record.weights.source), weights_sha256)
        before[-1] = replace(record.weights, key=key)
    notes: list[Staged] = []
    with ExitStack() as holds:
        for old in before:
            content = read_content(old.kind, Path(old.source), old.key)
            try:
                note = _stage(content, record.spec, holds, notes, old)
            except HardwareError as error:
                # The configured directory exists where staging was planned, but not here.
                note = _fall_back(_note(content), str(error))
            if note.action == "pre_read":
                paths = [content.source / name for name in content.sizes]
                # In the background.
                threading.Thread(target=_will_need, args=(paths,), daemon=True).start()
            notes.append(note)
        places = {"rows": record.rows.source} | {n.kind: n.target or n.source for n in notes}
        rows, weights = Path(places["rows"]), Path(places["weights"])
        try:
            yield Places(rows=rows, weights=weights, staged=tuple(notes))
        except (OSError, ExpertflowError):
            for note in notes:
                _check_there(note)
            raise


def _stage(
    content: Content,
    spec: StageSpec,
    holds: ExitStack,
    others: list[Staged],
    recorded: Staged | None = None,
) -> Staged:
    """Choose a place for content, given the others, and copy it; ``holds`` keeps the copy."""
    promised = sum(other.n_bytes for other in others if other.action == "pre_read")
    scratch, note = choose_place(content, spec, recorded=recorded, promised_bytes=promised)
    if scratch is None:
        return note
    # Imported here: the import takes longer than finding that nothing needs to be copied.
    from expertflow.staging.store import ensure_staged, open_store

    try:
        copy = ensure_staged(content, open_store(scratch))
    except HardwareError as problem:
        return _fall_back(note, str(problem))
    except OSError as error:
        return _fall_back(note, f"{scratch}: {error.strerror or error}")
    holds.enter_context(copy.hold)
    return replace(
        note,
        action="copied" if copy.seconds else "reused",
        target=str(copy.folder),
        n_bytes_copied=content.n_bytes if copy.seconds else 0,
        copy_bytes_per_s=content.n_bytes / copy.seconds if copy.seconds else None,
    )


def _fall_back(note: Staged, reason: str) -> Staged:
    log.warning("%s are read in place: %s", note.kind, reason)
    return replace(note, reason=reason, is_fallback=True)


def _will_need(paths: list[Path]) -> None:
    for path in paths:
        try:
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            log.info("%s: not read beforehand (%s)", path, error.strerror)


def _check_there(note: Staged) -> None:
    # A source may vanish, as a job's scratch directory does when the job ends.
    place = Path(note.target or note.source)
    try:
        is_there = read_content(note.kind, place, note.key).n_bytes == note.n_bytes
    except (DataError, OSError):
        is_there = False
    if not is_there:
        is_copy = note.target is not None
        fix = "run again to copy them" if is_copy else "restore them and run again"
        raise (TransientError if is_copy else HardwareError)(
            f"{place}: {note.kind} vanished while being read; {fix}, and training resumes"
            " from its last checkpoint"
        )


def choose_place(
    content: Content, spec: StageSpec, *, recorded: Staged | None = None, promised_bytes: int = 0
) -> tuple[Path | None, Staged]:
    """Return where to copy content on this machine (null: read in place), and why.

    ``recorded`` is an earlier choice, maybe on another machine; it is reused if it exists here.
    ``promised_bytes`` of memory are reserved for other content.
    """
    note = _note(content)
    if spec.scratch is None:
        return None, replace(note, reason=NO_SCRATCH)
    if content.kind == "weights" and not spec.weights:
        return None, replace(note, reason="stage_weights is false")
    kind = disk.file_system(content.largest)
    note = replace(note, source_file_system=kind)
    if kind in disk.IN_MEMORY:
        return None, replace(note, reason=f"it is in memory ({kind})")
    if spec.scratch != AUTO:
        methods = {"source_read_method": SET, "target_read_method": SET}
        return _set_directory(spec.scratch), replace(note, reason="scratch is set", **methods)
    if kind in LOCAL:
        return None, replace(note, reason=f"it is on a local disk already ({kind})")
    # Imported here: it takes 0.1 s, and local sources do not need it.
    from expertflow.hardware import probe

    free = probe.free_memory_bytes()
    if promised_bytes + content.n_bytes < MEMORY_SHARE * free:
        reason = f"it fits in memory ({content.n_bytes / 1e9:.2f} of {free / 1e9:.0f} GB free)"
        return None, replace(note, reason=reason, action="pre_read")
    if recorded is not None and recorded.target is not None:
        # {scratch}/expertflow-{user id}/{key}/files
        place = Path(recorded.target).parents[2]
        if _may_hold(place, content):
            speeds = {name: getattr(recorded, name) for name in SPEEDS}
            return place, replace(note, reason=recorded.reason, **speeds)
    return _choose_fastest(content, note)


def _note(content: Content) -> Staged:
    n_files = len(content.sizes)
    return fill_record(Staged, content, source=str(content.source), reason="", n_files=n_files)


def _set_directory(setting: str) -> Path:
    place = Path(os.path.expandvars(setting)).expanduser()
    if not place.is_dir():
        raise HardwareError(f"scratch {setting}: no such directory; create it, or set auto")
    kind = disk.file_system(place.resolve())
    if kind in disk.IN_MEMORY:
        raise HardwareError(
            f"scratch {setting}: is in memory ({kind}), which training needs; set a directory on a"
            " disk, or auto"
        )
    return place


def _may_hold(place: Path, content: Content) -> bool:
    return (
        # Below an inaccessible folder, is_dir() raises.
        os.access(place, os.X_OK)
        and place.is_dir()
        and place.stat().st_dev != content.largest.stat().st_dev
        and disk.file_system(place.resolve()) not in disk.IN_MEMORY
    )


def _choose_fastest(content: Content, note: Staged) -> tuple[Path | None, Staged]:
    speed, how = disk.measure_file(content.largest)
    places = (p for p in disk.list_candidates(os.environ) if _may_hold(p[0], content))
    found = disk.describe_places(places, measure=True)
    speeds = [place["read_bytes_per_s"] or 0.0 for place in found]
    note = replace(note, source_read_bytes_per_s=speed, source_read_method=how)
    where = f"it is on {note.source_file_system or 'an unknown file system'}"
    if not any(speeds):
        reason = f"{where}, and no disk on this machine could be measured"
        return None, replace(note, reason=reason)
    fastest, best = max(speeds), found[speeds.index(max(speeds))]
    source = f"an unknown speed ({how})" if speed is None else f"{speed / 1e9:.2f} GB/s"
    reason = (
        f"{where}, read at {source}, and {best['path']} ({best['asked_by']}) at"
        f" {fastest / 1e9:.2f} GB/s"
    )
    target = {"target_read_bytes_per_s": fastest, "target_read_method": best["read_method"]}
    is_faster = speed is None or fastest >= GAIN * speed
    return Path(best["path"]) if is_faster else None, replace(note, reason=reason, **target)
