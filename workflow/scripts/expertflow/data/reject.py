"""Why a record becomes no document. Nothing is dropped without a reason."""

import json
from typing import Any

from msgspec import Struct

EXCERPT_CHARS = 80


class Reject(Exception):
    """A record that is no document: a fault of the data.

    ``reason`` is the code under which it is counted; ``field`` and ``value`` are what was found.
    """

    def __init__(
        self, reason: str, detail: str = "", *, field: str | None = None, value: Any = None
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.field = field
        self.value = excerpt(value)


class Filtered(Reject):
    """A document that the manifest does not want: it failed a check, or holds a secret."""


# Not frozen: one is made for every record, and freezing would take a third of the reader's time.
class RawRecord(Struct, kw_only=True):
    """A raw item; ``value`` is null if it is unreadable, ``number`` its line or row, from 1."""

    path: str
    number: int
    unit: str
    value: dict[str, Any] | None
    fault: Reject | None = None

    @property
    def where(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"


def excerpt(value: Any) -> str | None:
    """Return the start of a value, in characters that any terminal and file can hold."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text[:EXCERPT_CHARS].encode("utf-8", "backslashreplace").decode()


# Their details are made by this project, without anything of the record.
_SAYS_NO_DATA = ("secret", "in_benchmark")


def without_data(record: RawRecord, reject: Reject) -> Reject:
    """Leave out all that a reject quotes of its record; which fault it is and where stays.

    A reader names the fields of its faults by the data's own keys, all else by the manifest's.
    """
    detail = reject.detail if reject.reason in _SAYS_NO_DATA else ""
    field = None if record.value is None else reject.field
    return type(reject)(reject.reason, detail, field=field)


def reject_line(record: RawRecord, reject: Reject) -> str:
    found = {name: getattr(reject, name) for name in ("reason", "field", "value", "detail")}
    return json.dumps({"path": record.path, record.unit: record.number, **found})


def describe(record: RawRecord, reject: Reject) -> str:
    place = f" in field {reject.field}" if reject.field else ""
    value = f"value {reject.value!r}" if reject.value is not None else ""
    said = ", ".join(filter(None, (reject.detail, value)))
    return f"{record.where}: {reject.reason}{place}" + (f" ({said})" if said else "")
