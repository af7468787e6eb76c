"""Parse a JSON object strictly, or report its fault.

``orjson`` is fast but keeps the last of two equal keys, turns integers beyond 64 bits into floats
and explains little. So its value is used only if a few cheap counts prove that none of this
happened; otherwise the standard library parses the bytes again and reports the fault.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import orjson

from expertflow.data.records import Fields
from expertflow.data.reject import UTF8_FIX, Reject, excerpt

# Deeper values could exceed Python's recursion limit of 1,000 elsewhere.
MAX_DEPTH = 200
INT64_MIN, UINT64_MAX = -(1 << 63), (1 << 64) - 1
_FLOAT_MIN, _FLOAT_MAX = float(INT64_MIN), float(UINT64_MAX)
_DOUBTFUL = 1 << 60
_BLANKS = b" \t\r\n"
_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_PYTHON = re.compile(r"[urb]?'|None\b|True\b|False\b")
_CUT_NUMBER = re.compile(r"-|\.|\.?\d*[eE][+-]?")
_CUT_ESCAPE = re.compile(r"\\?u?[0-9a-fA-F]{0,4}")


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
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        # A file cut by bytes may end within a character.
        if error.end == len(line) and error.reason == "unexpected end of data":
            raise Reject("truncated", "ends within a character", value=_start(line)) from error
        detail = f"byte {line[error.start]:#04x} at {error.start + 1}: {error.reason}; {UTF8_FIX}"
        raise Reject("not_utf8", detail, value=_start(line)) from error
    if text.startswith("\ufeff"):
        raise Reject("byte_order_mark", "in the middle of the file", value=text[1:])
    if "\0" in text:
        raise Reject("nul_character", "the text contains NUL bytes", value=text)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _syntax_fault(text, error) from error
    except RecursionError as error:
        raise Reject("too_deep", f"objects and lists nest deeper than {MAX_DEPTH}") from error
    if not isinstance(value, dict):
        raise Reject("not_an_object", f"a {_KINDS[type(value)]}", value=text)
    _count_keys(value, 1)
    for key, part in _leaves(value):
        field = excerpt(key)
        if isinstance(part, Reject):
            part.field = field
            raise part
        if "\0" in part:
            raise Reject("nul_character", "a \\u0000 escape", field=field, value=part)
        if has_lone_surrogate(part):
            raise Reject("lone_surrogate", "half of a surrogate pair", field=field, value=part)


def has_lone_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def _start(line: bytes) -> str:
    return line[:400].decode("utf-8", "backslashreplace")


def _syntax_fault(text: str, error: json.JSONDecodeError) -> Reject:
    # "Invalid control character at" is one of the messages.
    detail = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    rest = text[error.pos :].rstrip()
    if error.msg == "Extra data":
        return Reject("several_values", detail, value=rest)
    if _PYTHON.match(rest):
        return Reject("python_repr", f"Python syntax, {detail}", value=text)
    # The parser may have stopped at the start of something valid.
    if error.msg.startswith("Invalid \\"):
        is_cut = _CUT_ESCAPE.fullmatch(rest) is not None
    else:
        is_cut = any(literal.startswith(rest) for literal in _LITERALS)
    is_cut = is_cut or error.msg.startswith("Unterminated string")
    if is_cut or _CUT_NUMBER.fullmatch(rest):
        return Reject("truncated", f"ends early: {detail}", value=text)
    return Reject("not_json", detail, value=rest)


def _leaves(value: Any) -> Iterator[tuple[str | None, str | Reject]]:
    todo: list[tuple[str | None, Any]] = [(None, value)]
    while todo:
        field, item = todo.pop()
        if isinstance(item, str | Reject):
            yield field, item
        elif isinstance(item, list):
            # Reversed, so that the first leaf is popped first.
            todo.extend((field, part) for part in reversed(item))
        elif isinstance(item, dict):
            for key, part in reversed(item.items()):
                outer = key if field is None else field
                todo += [(outer, part), (outer, key)]


def _unique(pairs: list[tuple[str, Any]]) -> Fields:
    value: Fields = {}
    for key, item in pairs:
        if key in value:
            name = excerpt(key)
            raise Reject("duplicate_key", "appears twice in one object", field=name, value=item)
        value[key] = item
    return value


def _finite(text: str) -> float | Reject:
    number = float(text)
    if math.isfinite(number):
        return number
    return Reject("not_finite", f"{text[:40]} is not a finite number", value=text)


def _integer(text: str) -> int | Reject:
    # Python rejects integers with thousands of digits; 21 are already too many.
    if len(text) <= 20 and INT64_MIN <= int(text) <= UINT64_MAX:
        return int(text)
    return Reject("integer_over_64_bits", "write it as a string or a float", value=text)


_KINDS = {list: "list", str: "string", int: "number", float: "number", bool: "truth value"}
_KINDS |= {type(None): "null", Reject: "number"}
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_int=_integer, parse_constant=_finite
)
