"""Reasons why a record yields no document; nothing is dropped without one."""

import json
from typing import Any

from msgspec import Struct

EXCERPT_CHARS = 80


class Reject(Exception):
    """A record with a data fault, counted under the code ``reason``."""

    def __init__(
        self, reason: str, detail: str = "", *, field: str | None = None, value: Any = None
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.field = field
        self.value = excerpt(value)


class Filtered(Reject):
    """A document that the manifest excludes: it failed a check, or contains a secret."""


# Not frozen: freezing each record would take a third of the reader's time.
class RawRecord(Struct, kw_only=True):
    """A raw item; ``value`` is None if unreadable, ``number`` its 1-based line or row."""

    path: str
    number: int
    unit: str
    value: dict[str, Any] | None
    fault: Reject | None = None

    @property
    def where(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"


def excerpt(value: Any) -> str | None:
    """Return the start of a value, escaping what UTF-8 cannot hold."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text[:EXCERPT_CHARS].encode("utf-8", "backslashreplace").decode()


# Reasons whose details never quote the record.
_SAYS_NO_DATA = ("secret", "in_benchmark")


def without_data(record: RawRecord, reject: Reject) -> Reject:
    """Remove what a reject quotes from its record; fault and location stay.

    Readers name fields by the data's own keys; everything else, by the manifest's.
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
