"""Reasons why a record yields no document; nothing is dropped without one."""

import json
import logging
from collections import Counter
from typing import IO, Any

from msgspec import Struct, field

from expertflow.core.errors import DataError, single_line
from expertflow.data.records import Fields
from expertflow.data.settings import PrepareSpec

log = logging.getLogger(__name__)

EXCERPT_CHARS = 80
N_EXAMPLES = 3
# This many rejects in a shard trigger a warning before the complete source is checked.
N_MANY = 1000
# Reasons whose details never quote the record.
QUOTING_NOTHING = ("secret", "in_benchmark")
# Parsers need about 20 Python frames per bracket. This stays well below Python's recursion limit of
# 1000, part of which the caller has used.
MAX_NESTING = 32
UTF8_FIX = "convert the file, e.g. iconv -f CP1252 -t UTF-8"


class Reject(Exception):
    """A record with a data fault, counted under the code ``reason``."""

    def __init__(
        self, reason: str, detail: str = "", *, field: str | None = None, value: Any = None
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.field = field
        # Cut here: an error must not keep a huge record alive.
        self.value = excerpt(value)


class Filtered(Reject):
    """A document that the manifest excludes: it failed a check, or contains a secret."""


# Not frozen: freezing each record would take a third of the reader's time.
class RawRecord(Struct, kw_only=True):
    """A raw item; ``value`` is None if unreadable, ``number`` its 1-based line or row."""

    path: str
    number: int
    unit: str
    value: Fields | None
    fault: Reject | None = None

    @property
    def where(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"


class RejectLog(Struct):
    """Writes a shard's rejects as JSON lines, and counts them by reason."""

    spec: PrepareSpec
    stream: IO[str]
    rejected: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, record: RawRecord, reject: Reject) -> None:
        """Write a reject; DataError if the manifest stops at the first one."""
        source, found = self.spec.source, reject
        # What is kept out of documents must not appear in logs or rejects either.
        is_private = source.scan_secrets or source.pseudonymize_emails
        if is_private:
            # Readers name fields by the data's own keys; everything else, by the manifest's.
            detail = found.detail if found.reason in QUOTING_NOTHING else ""
            place = None if record.value is None else found.field
            reject = type(found)(found.reason, detail, field=place)
        shown = {name: getattr(reject, name) for name in ("reason", "field", "value", "detail")}
        line = {"path": record.path, record.unit: record.number, **shown}
        # ASCII with escapes, so that lone surrogates can be written.
        self.stream.write(json.dumps(line) + "\n")
        if isinstance(reject, Filtered):
            self.filtered[reject.reason] += 1
            return
        self.rejected[reject.reason] += 1
        if len(self.examples) < N_EXAMPLES:
            self.examples.append(_describe(record, reject))
        # Once, at exactly this many.
        if self.rejected.total() == N_MANY:
            log.warning("%d records rejected so far; first: %s", N_MANY, self.examples[0])
        if self.spec.on_reject == "stop":
            # A traceback would show a private record in its cause.
            raise DataError(
                f"source {source.name}: {_describe(record, reject)}; correct the record, or set"
                " data.on_reject to skip"
            ) from (None if is_private else found)


def _describe(record: RawRecord, reject: Reject) -> str:
    place = f" in field {reject.field}" if reject.field else ""
    value = f"value {reject.value!r}" if reject.value is not None else ""
    details = ", ".join(filter(None, (reject.detail, value)))
    return f"{record.where}: {reject.reason}{place}" + (f" ({details})" if details else "")


def excerpt(value: Any) -> str | None:
    """Return the start of a value, escaping what UTF-8 cannot encode."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text[:EXCERPT_CHARS].encode("utf-8", "backslashreplace").decode()


def clip_message(message: object) -> str:
    """Shorten a parser's message to one line; it may quote the value at length."""
    return excerpt(single_line(message)) or ""


def why_too_hard(text: str, *, max_chars: int) -> str | None:
    """Return why a text is not passed to a parser; brackets in strings count too."""
    if len(text) > max_chars:
        return f"longer than {max_chars:,} characters, too long to parse"
    deepest = level = 0
    for char in text:
        if char in "([{":
            level += 1
            deepest = max(deepest, level)
        elif char in ")]}":
            level = max(0, level - 1)
    if deepest > MAX_NESTING:
        return f"nested {deepest:,} brackets deep, at most {MAX_NESTING} are parsed"
    return None
