"""Choose where to read from: in place, from memory, or from a copy on the fastest disk."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from expertflow.core.errors import HardwareError
from expertflow.hardware import disk
from expertflow.stage.content import Content
from expertflow.stage.records import AUTO, Staged, StageSpec

# On a disk of this machine, a copy on another one seldom pays.
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "ntfs", "ntfs3",
         "vfat", "exfat", "apfs", "hfs"}  # fmt: skip
# Of free memory: what is read once stays there, and leaves as much for training.
MEMORY_SHARE = 0.5
# A copy has to be read so much faster than its source, or is not worth making (judgement).
GAIN = 1.5
SET = "not measured: scratch is set"
NOT_NEEDED = "not measured: it decides nothing here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A measured reading speed, or null; and how, or why not."""

    bytes_per_s: float | None
    method: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Where a copy belongs, or null: then the source is read, and beforehand if ``pre_read``."""

    scratch: Path | None
    reason: str
    file_system: str | None
    pre_read: bool = False
    source: Speed = Speed(bytes_per_s=None, method=NOT_NEEDED)
    target: Speed = Speed(bytes_per_s=None, method=NOT_NEEDED)


def choose(
    content: Content, spec: StageSpec, *, recorded: Staged | None = None, promised_bytes: int = 0
) -> Choice:
    """Say where content is best read from on this machine.

    ``recorded`` is what was chosen before, maybe elsewhere: its place is taken again where it is
    there. ``promised_bytes`` of memory will hold other content.

    Raises:
        HardwareError: the directory that is set cannot be used.
    """
    if spec.scratch is None:
        return _in_place("scratch is null", None)
    if content.kind == "weights" and not spec.weights:
        return _in_place("stage_weights is false", None)
    kind = disk.file_system(content.largest)
    if kind in disk.IN_MEMORY:
        return _in_place(f"it lies in memory ({kind})", kind)
    if spec.scratch != AUTO:
        return Choice(
            scratch=_set_directory(spec.scratch),
            reason="scratch is set",
            file_system=kind,
            source=Speed(bytes_per_s=None, method=SET),
            target=Speed(bytes_per_s=None, method=SET),
        )
    if kind in LOCAL:
        return _in_place(f"it is on a local disk already ({kind})", kind)
    free = _free_memory_bytes()
    if promised_bytes + content.n_bytes < MEMORY_SHARE * free:
        return Choice(
            scratch=None,
            reason=f"it fits into memory ({content.n_bytes / 1e9:.2f} of {free / 1e9:.0f} GB free)",
            file_system=kind,
            pre_read=True,
        )
    return _again(content, kind, recorded) or _fastest(content, kind)


def _in_place(reason: str, file_system: str | None) -> Choice:
    return Choice(scratch=None, reason=reason, file_system=file_system)


def _set_directory(setting: str) -> Path:
    """Read the setting as this machine's shell would."""
    place = Path(os.path.expandvars(setting)).expanduser()
    if not place.is_dir():
        raise HardwareError(f"scratch {setting}: no such directory; create it, or set auto")
    kind = disk.file_system(place.resolve())
    if kind in disk.IN_MEMORY:
        raise HardwareError(
            f"scratch {setting}: is memory ({kind}), which training needs; name a disk, or set auto"
        )
    return place


def _free_memory_bytes() -> int:
    # Here, as it takes 0.1 s to import and a local source does without.
    from expertflow.hardware.probe import free_memory_bytes

    return free_memory_bytes()


def _again(content: Content, kind: str | None, recorded: Staged | None) -> Choice | None:
    """Take the place of an earlier choice if this machine has it."""
    if recorded is None or recorded.target is None:
        return None
    # {scratch}/expertflow-{user id}/{key}/files
    place = Path(recorded.target).parents[2]
    if not _may_hold(place, content):
        return None
    return Choice(
        scratch=place,
        reason=recorded.reason,
        file_system=kind,
        source=Speed(
            bytes_per_s=recorded.source_read_bytes_per_s, method=recorded.source_read_method
        ),
        target=Speed(
            bytes_per_s=recorded.target_read_bytes_per_s, method=recorded.target_read_method
        ),
    )


def _may_hold(place: Path, content: Content) -> bool:
    """Tell whether a place is on a disk of its own, that is none in memory."""
    return (
        place.is_dir()
        and place.stat().st_dev != content.largest.stat().st_dev
        and disk.file_system(place.resolve()) not in disk.IN_MEMORY
    )


def _fastest(content: Content, kind: str | None) -> Choice:
    """Measure the source and the places for a copy past the page cache, and compare them."""
    speed, how = disk.file_read_speed(content.largest)
    source = Speed(bytes_per_s=speed, method=how)
    found = disk.scratch_facts(_candidates(content), measure=True)
    measured = [place for place in found if place.read_bytes_per_s is not None]
    where = f"it is on {kind or 'an unknown file system'}"
    if not measured:
        reason = f"{where}, and no disk of this machine could be measured"
        return Choice(scratch=None, reason=reason, file_system=kind, source=source)
    best = max(measured, key=lambda place: place.read_bytes_per_s or 0.0)
    target = Speed(bytes_per_s=best.read_bytes_per_s, method=best.read_method)
    reason = (
        f"{where}, read at {_words(source)}, and {best.path} ({best.asked_by}) at {_words(target)}"
    )
    known = source.bytes_per_s is not None
    is_faster = not known or (target.bytes_per_s or 0.0) >= GAIN * (source.bytes_per_s or 0.0)
    return Choice(
        scratch=Path(best.path) if is_faster else None,
        reason=reason,
        file_system=kind,
        source=source,
        target=target,
    )


def _candidates(content: Content) -> Iterator[tuple[Path, str]]:
    for place, why in disk.candidates(None, dict(os.environ)):
        if _may_hold(place, content):
            yield place, why


def _words(speed: Speed) -> str:
    if speed.bytes_per_s is None:
        return f"an unknown speed ({speed.method})"
    return f"{speed.bytes_per_s / 1e9:.2f} GB/s"
