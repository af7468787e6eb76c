"""Tell which cards a job may see: CUDA_VISIBLE_DEVICES."""

import re
from collections.abc import Sequence

from expertflow.core.records import Record

HIDDEN = "CUDA_VISIBLE_DEVICES hides every GPU"
MIG = "CUDA_VISIBLE_DEVICES names a MIG instance; its share of a card is not watched"
MIG_MODE = "the card is in MIG mode; a share of a card is not watched"
# An entry counts as far as it is a number.
_NUMBER = re.compile(r"[+-]?[0-9]+")


class Visible(Record, frozen=True, kw_only=True):
    """Indexes of cards in the order of the job; ``reason`` where there are none."""

    indexes: tuple[int, ...]
    reason: str | None = None


def visible_gpus(setting: str | None, uuids: Sequence[str | None]) -> Visible:
    """Give the cards that ``setting`` leaves to a job, of those with these UUIDs.

    A list ends at the first entry that names no card; one that names a card again hides all, as
    does an empty one. A UUID may be cut short where it stays unique.

    >>> visible_gpus("1,0", ["GPU-a", "GPU-b"]).indexes
    (1, 0)
    """
    if setting is None:
        return Visible(indexes=tuple(range(len(uuids))))
    found: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.startswith("MIG-"):
            return Visible(indexes=(), reason=MIG)
        number = _NUMBER.match(entry)
        index = gpu_index(number[0].removeprefix("+") if number else entry, uuids)
        if index is None:
            break
        if index in found:
            return Visible(indexes=(), reason=HIDDEN)
        found.append(index)
    return Visible(indexes=tuple(found), reason=None if found else HIDDEN)


def gpu_index(entry: str, uuids: Sequence[str | None]) -> int | None:
    """Give the index of the card that an index or (the start of) a UUID names; null if none."""
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    matches = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
