"""Parse a JSON object strictly, or report its fault.

``orjson`` is fast but keeps the last of two equal keys, turns integers beyond 64 bits into floats
and explains little. So its value is used only if a few cheap counts prove that none of this
happened; otherwise the standard library parses the bytes again and reports the fault.
"""

import json
import math
import re
from typing import Any

import orjson

from expertflow.core.strict_json import refuse_repeats
from expertflow.data.records import Fields
from expertflow.data.reject import UTF8_FIX, Reject, excerpt

# Deeper values could exceed Python's recursion limit of 1,000 elsewhere.
MAX_DEPTH = 200
INT64_MIN, UINT64_MAX = -(1 << 63), (1 << 64) - 1
_FLOAT_MIN, _FLOAT_MAX = float(INT64_MIN), float(UINT64_MAX)
_DOUBTFUL = 1 << 60
_BLANKS = b" \t\r\n"
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_object(line: bytes) -> Fields:
    """Parse one JSON object; Reject whatever other readers might read differently."""
    value, complaint = None, ""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        complaint = str(error)
    if type(value) is not dict:
        _check_slowly(line)
        raise Reject("not_json", complaint, value=_start(line))
    n_keys = _count_keys(value, 1)
    doubtful = line.count(b":") != n_keys and _may_have_more_keys(line, n_keys)
    if doubtful or (b"\\" in line and b"\\u0000" in line):
        _check_slowly(line)
    return value


def _may_have_more_keys(line: bytes, n_keys: int) -> bool:
    # Each key ends in a quote and a colon, so there are at least as many of these as keys.
    packed = line.translate(None, _BLANKS)
    most = packed.count(b'":')
    if most > n_keys:
        # An escaped quote does not end a key, unless the backslash itself is escaped.
        most += packed.count(b'\\\\":') - packed.count(b'\\":')
    return most != n_keys


def _count_keys(box: Any, depth: int) -> int:
    """Count all keys; a float that may be a large integer makes the count far too high."""
    if depth > MAX_DEPTH:
        raise Reject("too_deep", f"objects and lists nest deeper than {MAX_DEPTH}")
    n_keys = 0
    if type(box) is dict:
        n_keys = len(box)
        box = box.values()
    for item in box:
        kind = type(item)
        if kind is str:
            continue
        if kind is dict or kind is list:
            n_keys += _count_keys(item, depth + 1)
        elif kind is float and not _FLOAT_MIN < item < _FLOAT_MAX:
            # orjson reads integers beyond 64 bits as floats; such a count matches no text.
            n_keys += _DOUBTFUL
    return n_keys


def _check_slowly(line: bytes) -> None:
    text = decode_text(line)
    if text.startswith("\ufeff"):
        raise Reject("byte_order_mark", "in the middle of the file", value=text[1:])
    try:
        # Python rejects integers with thousands of digits; 30 are already too many.
        value = json.loads(
            text, object_pairs_hook=refuse_repeats, parse_int=lambda digits: int(digits[:30])
        )
    except json.JSONDecodeError as error:
        # "Invalid control character at" is one of the messages.
        detail = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        rest = text[error.pos :] or text
        if rest.startswith(("'", "None", "True", "False")):
            detail += "; Python printed this, write it with json.dumps"
        raise Reject("not_json", detail, value=rest) from error
    except ValueError as error:
        raise Reject("duplicate_key", str(error)[:120], value=text) from error
    except RecursionError as error:
        raise Reject("too_deep", f"objects and lists nest deeper than {MAX_DEPTH}") from error
    if not isinstance(value, dict):
        raise Reject("not_an_object", f"found {type(value).__name__}", value=text)
    _count_keys(value, 1)
    check_value(value)


def decode_text(raw: bytes) -> str:
    """Decode UTF-8; Reject other bytes, and NUL, at which many programs cut a text."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        detail = f"byte {raw[error.start]:#04x} on line {line} of the record; {UTF8_FIX}"
        raise Reject("not_utf8", detail, value=_start(raw)) from error
    if "\0" in text:
        raise Reject("nul_character", "the text contains NUL", value=text)
    return text


def check_value(value: Any, place: str | None = None) -> None:
    """Reject what a document's JSON cannot hold, with its ``place`` or its outermost key."""
    # A loop, since values may nest deeply; reversed, so that the first item is popped first.
    todo: list[tuple[str | None, Any]] = [(place, value)]
    while todo:
        field, item = todo.pop()
        if isinstance(item, list):
            todo += [(field, part) for part in reversed(item)]
        elif isinstance(item, dict):
            for key, part in reversed(item.items()):
                outer = key if field is None else field
                todo += [(outer, part), (outer, key)]
        elif (fault := _fault_of(item)) is not None:
            raise Reject(*fault, field=excerpt(field), value=item)


def _fault_of(item: object) -> tuple[str, str] | None:
    if isinstance(item, str):
        if "\0" in item:
            return "nul_character", "the text contains U+0000"
        if not item.isascii() and _SURROGATE.search(item):
            return "lone_surrogate", "half of a surrogate pair"
        return None
    if isinstance(item, int):
        fits = INT64_MIN <= item <= UINT64_MAX
        return None if fits else ("integer_over_64_bits", "write it as text")
    if isinstance(item, float):
        return None if math.isfinite(item) else ("not_finite", "not a finite number")
    if item is None:
        return None
    return "not_json", f"JSON cannot represent this {type(item).__name__}"


def _start(line: bytes) -> str:
    return line[:400].decode("utf-8", "backslashreplace")
