"""JSON files: an array of objects, or concatenated objects, in constant memory.

An object's end is found by counting brackets outside strings; its bytes are then parsed as strictly
as a JSON line. A fault rejects its object only; an unclosed object stops reading instead of
swallowing all that follows.
"""

import io
import re
from collections.abc import Iterator

from expertflow.core.errors import DataError
from expertflow.data.formats.lines import read_record, too_large
from expertflow.data.formats.options import MAX_RECORD_BYTES, ReadOptions
from expertflow.data.formats.streams import BUFFER_BYTES
from expertflow.data.parse import parse_object
from expertflow.data.records import DataFile
from expertflow.data.reject import RawRecord, Reject

# A string ends at its quote, at a line end (broken), or at the window's end.
# Possessive repeats never backtrack, so that an unclosed string takes linear time.
_TOKEN = re.compile(rb'"(?:[^"\\\n]++|\\.)*+("?)|[{}\[\]]', re.DOTALL)
_PLAIN = re.compile(rb'[^][{}",\s]*')
_NOT_BLANK = re.compile(rb"[^ \t\r\n]")
_NEWLINE = 10


def iter_all(stream: io.BufferedReader, file: DataFile, _: ReadOptions) -> Iterator[RawRecord]:
    for number, element in _elements(_Window(stream), file.path):
        yield read_record(parse_object, element, file.path, number)


class _Window:
    def __init__(self, stream: io.BufferedReader) -> None:
        self.buffer = b""
        self.pos = 0
        self.line = 1
        self._stream = stream

    def read_more(self) -> bool:
        """Read as much again as the element so far, so that long ones take linear time."""
        kept = self.buffer[self.pos :]
        chunk = self._stream.read(max(BUFFER_BYTES, len(kept)))
        self.buffer, self.pos = kept + chunk, 0
        return bool(chunk)

    def advance_to(self, position: int) -> None:
        self.line += self.buffer.count(b"\n", self.pos, position)
        self.pos = position

    def peek(self) -> bytes:
        while True:
            if found := _NOT_BLANK.search(self.buffer, self.pos):
                self.advance_to(found.start())
                return found[0]
            self.advance_to(len(self.buffer))
            if not self.read_more():
                return b""


def _elements(window: _Window, path: str) -> Iterator[tuple[int, bytes | Reject]]:
    in_array = comma_due = False
    while byte := window.peek():
        line = window.line
        if byte == b"[" and not in_array:
            in_array, comma_due = True, False
            window.advance_to(window.pos + 1)
        elif byte == b"]" and in_array:
            in_array = False
            window.advance_to(window.pos + 1)
        elif byte == b",":
            if not (in_array and comma_due):
                yield line, Reject("not_json", "a comma where an object should be", value=",")
            comma_due = False
            window.advance_to(window.pos + 1)
        else:
            if in_array and comma_due:
                yield line, Reject("not_json", "no comma before this element")
            yield line, _take(window, path) if byte in b'{["' else _take_plain(window)
            comma_due = True
    if in_array:
        raise DataError(
            f"{path}: ends on line {window.line} inside the array; a bracket is missing, or"
            " the download is incomplete"
        )


def _take(window: _Window, path: str) -> bytes | Reject:
    at, depth, fault, first = window.pos, 0, None, window.line
    while True:
        # Continues where the last window ended: bytes are scanned once, however long the element.
        at, depth, complete = _scan(window.buffer, at, depth)
        if complete:
            break
        if len(window.buffer) - window.pos > MAX_RECORD_BYTES:
            fault = too_large()
            at = _forget(window, at)
        done = at - window.pos
        if not window.read_more():
            raise DataError(
                f"{path}: ends inside the element that starts on line {first}; a bracket is"
                " missing, or the download is incomplete"
            )
        at = done
    element = window.buffer[window.pos : at]
    window.advance_to(at)
    if len(element) > MAX_RECORD_BYTES:
        fault = too_large()
    return fault or element


def _scan(buffer: bytes, at: int, depth: int) -> tuple[int, int, bool]:
    """Follow brackets from ``at``; return the next position, its depth, and if it is complete."""
    for match in _TOKEN.finditer(buffer, at):
        byte = buffer[match.start()]
        if byte in b"{[":
            depth += 1
        elif byte in b"}]":
            depth -= 1
        elif not match[1]:
            end = match.end()
            if end < len(buffer) and buffer[end] == _NEWLINE:
                return end, depth, True
            return match.start(), depth, False
        if depth <= 0:
            return match.end(), depth, True
    return len(buffer), depth, False


def _forget(window: _Window, at: int) -> int:
    """Drop the read part of a too-large element; keep the quote of an open string."""
    window.advance_to(at)
    cut = _TOKEN.match(window.buffer, at)
    window.buffer = b'"' + window.buffer[cut.end() :] if cut else b""
    window.pos = 0
    return 0


def _take_plain(window: _Window) -> bytes:
    while True:
        found = _PLAIN.match(window.buffer, window.pos)
        end = found.end() if found else window.pos
        if end < len(window.buffer) or end - window.pos > BUFFER_BYTES or not window.read_more():
            break
    # At least one byte, or a stray closing bracket would loop forever.
    end = max(end, window.pos + 1)
    plain = window.buffer[window.pos : end]
    window.advance_to(end)
    return plain
