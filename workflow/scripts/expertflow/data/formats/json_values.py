"""JSON files: an array of objects, or concatenated objects, in constant memory.

An object is decoded once to find its end, and its bytes are then parsed as strictly as a JSON line.
A fault that hides where an object ends refuses the file.
"""

import io
import json
import re
from collections.abc import Iterator

from expertflow.core.errors import DataError
from expertflow.data.formats.lines import read_record
from expertflow.data.formats.options import MAX_RECORD_BYTES, ReadOptions
from expertflow.data.formats.streams import BUFFER_BYTES
from expertflow.data.parse import parse_object
from expertflow.data.records import DataFile
from expertflow.data.reject import RawRecord

_NOT_BLANK = re.compile(r"[^ \t\r\n]")
# Lenient, and without converting numbers: the strict parser judges what has an end.
_DECODER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)


def iter_all(stream: io.BufferedReader, file: DataFile, _: ReadOptions) -> Iterator[RawRecord]:
    for number, element in _elements(stream, file.path):
        yield read_record(parse_object, element, file.path, number)


def _elements(stream: io.BufferedReader, path: str) -> Iterator[tuple[int, bytes]]:
    """Yield each object, or what is in its place, with its first line; DataError if it is cut."""
    # Bytes that are not UTF-8 stay, for the strict parser to report.
    source = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
    text, at, line = "", 0, 1
    in_array = comma_due = False
    while True:
        start, found = at, _NOT_BLANK.search(text, at)
        at = found.start() if found else len(text)
        line += text.count("\n", start, at)
        if at == len(text):
            text, at = source.read(BUFFER_BYTES), 0
            if not text:
                break
        elif text[at] == "[" and not in_array:
            in_array, comma_due, at = True, False, at + 1
        elif text[at] == "]" and in_array:
            in_array, at = False, at + 1
        elif text[at] == "," and in_array and comma_due:
            comma_due, at = False, at + 1
        elif in_array and comma_due:
            raise DataError(f"{path}, line {line}: no comma before this element; add one")
        else:
            end, fault = _find_end(text, at, line)
            # Whatever touches the window's end may go on. Read as much again, so that a long object
            # takes linear time.
            if end == len(text) and end - at <= MAX_RECORD_BYTES:
                if more := source.read(max(BUFFER_BYTES, end - at)):
                    text, at = text[at:] + more, 0
                    continue
            element = text[at:end].encode("utf-8", "surrogateescape")
            if len(element) > MAX_RECORD_BYTES:
                fault = f"over {MAX_RECORD_BYTES >> 20} MiB; add the missing quote, or shorten it"
            if fault:
                raise DataError(f"{path}, line {line}: {fault}")
            yield line, element
            line += text.count("\n", at, end)
            at, comma_due = end, True
    if in_array:
        raise DataError(
            f"{path}: ends on line {line} inside the array; a bracket is missing, or the download"
            " is incomplete"
        )


def _find_end(text: str, at: int, line: int) -> tuple[int, str]:
    """Return where an element ends; the text's end, and why, if more text may show it."""
    end = len(text)
    try:
        return _DECODER.raw_decode(text, at)[1], ""
    except json.JSONDecodeError as error:
        where = line + text.count("\n", at, error.pos)
        why = f"not JSON ({error.msg} on line {where})"
        # The text's end may have cut a string, or a word or escape that begins shortly before it.
        if not error.msg.startswith("Unterminated"):
            end = min(end, error.pos + 20)
    except RecursionError:
        why = "nested too deeply"
    return end, f"{why}; correct it, or fetch the file again"
