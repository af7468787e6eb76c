"""JSON Lines: one object a line, cut by bytes.

Lines end at byte 0x0A only: ``str.splitlines`` would also break at U+2028, U+2029 and U+0085, which
are legal inside JSON strings.
"""

import io
import re
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from expertflow.core.errors import DataError
from expertflow.data.formats.options import MAX_RECORD_BYTES, ReadOptions
from expertflow.data.formats.streams import BOM, BUFFER_BYTES, open_bytes, open_utf8, recoded
from expertflow.data.parse import parse_object
from expertflow.data.records import DataFile
from expertflow.data.reject import RawRecord, Reject

_NEWLINE, _BRACE = b"\n{"
_NO_END = 1 << 62
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*(?=\n)")


def iter_range(
    file: DataFile, low: int, high: int, *, options: ReadOptions, block_bytes: int
) -> Iterator[RawRecord]:
    """Yield the records of an uncompressed file whose first byte lies in [low, high)."""
    path = Path(file.path)
    parse = parse_object
    if options.encoding != "utf-8":
        parse = partial(_parse_recoded, encoding=options.encoding)
    with open_bytes(path, None) as stream:
        if low > 0:
            stream.seek(low - 1)
            skip_line(stream, high - low + 1)
        elif stream.peek(3).startswith(BOM):
            stream.read(3)
        start = stream.tell()
        if start < high:
            number = 1 + _n_lines_before(start, file, block_bytes)
            n_bytes = yield from _records(
                stream, file.path, number=number, n_bytes=high - start, parse=parse
            )
            if start + n_bytes < high:
                raise DataError(f"{path}: changed since it was fetched; run again to take it in")


def iter_all(file: DataFile, *, options: ReadOptions) -> Iterator[RawRecord]:
    """Yield all records of a compressed file."""
    with open_utf8(Path(file.path), file.compression, options.encoding) as stream:
        yield from _records(stream, file.path, number=1, n_bytes=_NO_END, parse=parse_object)


def bounded_lines(stream: io.BufferedReader) -> Iterator[bytes | None]:
    """Yield lines with their ends; null stands for one that is too long to be held."""
    for line in iter(partial(stream.readline, MAX_RECORD_BYTES + 1), b""):
        if len(line) > MAX_RECORD_BYTES and line[-1] != _NEWLINE:
            skip_line(stream)
            yield None
        else:
            yield line


def skip_line(stream: io.BufferedReader, n_bytes: int = _NO_END) -> int:
    """Read past the next line end, at most ``n_bytes``; give the number of bytes read."""
    n_read = 0
    while part := stream.readline(min(BUFFER_BYTES, n_bytes - n_read)):
        n_read += len(part)
        if part[-1] == _NEWLINE:
            break
    return n_read


def too_large() -> Reject:
    """Say that a record is longer than any that is read."""
    return Reject("record_too_large", f"over {MAX_RECORD_BYTES >> 20} MiB")


def faulty(path: str, number: int, fault: Reject, *, unit: str = "line") -> RawRecord:
    """Make the record of what could not be read; the fault lets go of the text that it is about."""
    fault.__cause__ = fault.__context__ = None
    return RawRecord(
        path=path, number=number, unit=unit, value=None, fault=fault.with_traceback(None)
    )


def count_lines(path: Path, block_bytes: int) -> tuple[tuple[int, ...], int]:
    """Count the line ends in each block of a file, and the lines that are not blank."""
    n_newlines: list[int] = []
    n_blank = n_read = 0
    # The last line end and what follows it, as long as that is blank.
    open_line = b"\n"
    with path.open("rb", buffering=0) as stream:
        while part := _read_fully(stream, min(BUFFER_BYTES, block_bytes - n_read % block_bytes)):
            if n_read % block_bytes == 0:
                n_newlines.append(0)
            n_read += len(part)
            n_here, all_braced = _newlines(part)
            n_newlines[-1] += n_here
            # Where every line begins with a brace, none is blank; that is quickly seen.
            if not (all_braced and (not open_line or part[0] == _BRACE)):
                n_blank += len(_BLANK_LINE.findall(open_line + part))
            line = part[part.rfind(b"\n") :] if n_here else open_line + part
            open_line = line if line.isspace() and line[0] == _NEWLINE else b""
    return tuple(n_newlines), sum(n_newlines) - n_blank + (not open_line)


def _newlines(part: bytes) -> tuple[int, bool]:
    """Count line ends, and tell whether a brace follows each of them that is not the last byte."""
    text = np.frombuffer(part, np.uint8)
    ends = text == _NEWLINE
    n_followed = int(np.count_nonzero(ends[:-1] & (text[1:] == _BRACE)))
    n_ends = int(np.count_nonzero(ends))
    return n_ends, n_followed == n_ends - bool(ends[-1])


def _read_fully(stream: io.FileIO, n_bytes: int) -> bytes:
    """Read so many bytes, fewer only at the end: one call may give less."""
    parts = []
    while n_bytes > 0 and (part := stream.read(n_bytes)):
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def _n_lines_before(position: int, file: DataFile, block_bytes: int) -> int:
    """Count line ends before a byte: whole blocks are counted already, at most one is read."""
    n_blocks = min(position // block_bytes, len(file.n_newlines))
    n_lines = sum(file.n_newlines[:n_blocks])
    with open_bytes(Path(file.path), None) as stream:
        start = stream.seek(n_blocks * block_bytes)
        while part := stream.read(min(BUFFER_BYTES, position - start)):
            start += len(part)
            n_lines += part.count(b"\n")
    return n_lines


def _records(
    stream: io.BufferedReader,
    path: str,
    *,
    number: int,
    n_bytes: int,
    parse: Callable[[bytes], dict[str, Any]],
) -> Generator[RawRecord, None, int]:
    """Yield the records of the lines that begin in the next ``n_bytes``; give the bytes read."""
    n_read = 0
    max_bytes = MAX_RECORD_BYTES
    for line in iter(partial(stream.readline, max_bytes + 1), b""):
        n_read += len(line)
        if len(line) > max_bytes and line[-1] != _NEWLINE:
            n_read += skip_line(stream)
            yield faulty(path, number, too_large())
        elif not line.isspace():
            try:
                value = parse(line)
            except Reject as fault:
                yield faulty(path, number, fault)
            else:
                yield RawRecord(path=path, number=number, unit="line", value=value)
        number += 1
        if n_read >= n_bytes:
            break
    return n_read


def _parse_recoded(line: bytes, *, encoding: str) -> dict[str, Any]:
    return parse_object(recoded(line, encoding))
