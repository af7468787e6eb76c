"""Choose where to read from: in place, from memory, or from a copy on the fastest disk."""

import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import HardwareError
from expertflow.hardware import disk
from expertflow.staging.content import Content
from expertflow.staging.records import AUTO, Staged, StageSpec

# On a disk of this machine, a copy on another one seldom pays.
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "ntfs", "ntfs3",
         "vfat", "exfat", "apfs", "hfs"}  # fmt: skip
# Of free memory: what is read once stays there, and leaves as much for training.
MEMORY_SHARE = 0.5
# A copy has to be read so much faster than its source, or is not worth making (judgement).
GAIN = 1.5
SET = "not measured: scratch is set"
NOT_NEEDED = "not measured: it decides nothing here"
SPEEDS = ("source_read_bytes_per_s", "source_read_method",
          "target_read_bytes_per_s", "target_read_method")  # fmt: skip


def choose(
    content: Content, spec: StageSpec, *, recorded: Staged | None = None, promised_bytes: int = 0
) -> tuple[Path | None, Staged]:
    """Return the directory to copy content to on this machine, null to read it in place; and why.

    ``recorded`` is what was chosen before, maybe elsewhere: its place is taken again where it is
    there. ``promised_bytes`` of memory will hold other content.

    Raises:
        HardwareError: the directory that is set cannot be used.
    """
    if spec.scratch is None:
        return None, note_in_place(content, "scratch is null")
    if content.kind == "weights" and not spec.weights:
        return None, note_in_place(content, "stage_weights is false")
    kind = disk.file_system(content.largest)
    if kind in disk.IN_MEMORY:
        return None, note_in_place(content, f"it lies in memory ({kind})", source_file_system=kind)
    if spec.scratch != AUTO:
        note = note_in_place(
            content, "scratch is set", source_file_system=kind,
            source_read_method=SET, target_read_method=SET,
        )  # fmt: skip
        return _set_directory(spec.scratch), note
    if kind in LOCAL:
        reason = f"it is on a local disk already ({kind})"
        return None, note_in_place(content, reason, source_file_system=kind)
    free = _free_memory_bytes()
    if promised_bytes + content.n_bytes < MEMORY_SHARE * free:
        reason = f"it fits into memory ({content.n_bytes / 1e9:.2f} of {free / 1e9:.0f} GB free)"
        note = note_in_place(content, reason, source_file_system=kind)
        return None, replace(note, action="pre_read")
    if recorded is not None and recorded.target is not None:
        # {scratch}/expertflow-{user id}/{key}/files
        place = Path(recorded.target).parents[2]
        if _may_hold(place, content):
            speeds = {name: getattr(recorded, name) for name in SPEEDS}
            note = note_in_place(content, recorded.reason, source_file_system=kind, **speeds)
            return place, note
    return _choose_fastest(content, kind)


def note_in_place(content: Content, reason: str, **facts: Any) -> Staged:
    speeds = dict(zip(SPEEDS, (None, NOT_NEEDED) * 2, strict=True))
    return Staged(
        kind=content.kind,
        key=content.key,
        source=str(content.source),
        action="read_in_place",
        reason=reason,
        is_fallback=False,
        target=None,
        n_files=len(content.sizes),
        n_bytes=content.n_bytes,
        n_bytes_copied=None,
        copy_bytes_per_s=None,
        **{"source_file_system": None, **speeds, **facts},
    )


def _set_directory(setting: str) -> Path:
    """Return the directory that is set, read as this machine's shell would."""
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


def _may_hold(place: Path, content: Content) -> bool:
    """Return whether a place is on another disk than the source, and not in memory."""
    return (
        place.is_dir()
        and place.stat().st_dev != content.largest.stat().st_dev
        and disk.file_system(place.resolve()) not in disk.IN_MEMORY
    )


def _choose_fastest(content: Content, kind: str | None) -> tuple[Path | None, Staged]:
    """Measure the source and the places for a copy past the page cache, and compare them."""
    speed, how = disk.file_read_speed(content.largest)
    places = (p for p in disk.candidates(None, dict(os.environ)) if _may_hold(p[0], content))
    found = disk.scratch_facts(places, measure=True)
    speeds = [place.read_bytes_per_s or 0.0 for place in found]
    facts = {"source_file_system": kind, SPEEDS[0]: speed, SPEEDS[1]: how}
    where = f"it is on {kind or 'an unknown file system'}"
    if not any(speeds):
        reason = f"{where}, and no disk of this machine could be measured"
        return None, note_in_place(content, reason, **facts)
    fastest, best = max(speeds), found[speeds.index(max(speeds))]
    source = f"an unknown speed ({how})" if speed is None else f"{speed / 1e9:.2f} GB/s"
    reason = (
        f"{where}, read at {source}, and {best.path} ({best.asked_by}) at {fastest / 1e9:.2f} GB/s"
    )
    facts |= {SPEEDS[2]: fastest, SPEEDS[3]: best.read_method}
    is_faster = speed is None or fastest >= GAIN * speed
    return Path(best.path) if is_faster else None, note_in_place(content, reason, **facts)
