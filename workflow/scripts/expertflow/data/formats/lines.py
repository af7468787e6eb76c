"""JSON Lines and plain text: files that are cut at line ends.

Lines end at byte 0x0A only: ``str.splitlines`` would also break at U+2028, U+2029 and U+0085, legal
in JSON strings. A text record is a file or a line, with keys ``text`` and ``name``.
"""

import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.data.formats.options import MAX_RECORD_BYTES, ReadOptions
from expertflow.data.formats.streams import BOM, BUFFER_BYTES, open_bytes
from expertflow.data.parse import parse_object
from expertflow.data.records import DataFile, Fields
from expertflow.data.reject import UTF8_FIX, RawRecord, Reject

_NEWLINE = 10
_NO_END = 1 << 62
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*(?=\n)")


def iter_range(file: DataFile, low: int, high: int, *, block_bytes: int) -> Iterator[RawRecord]:
    """Yield the records of an uncompressed JSONL file that start in bytes [low, high)."""
    with open_bytes(Path(file.path), None) as stream:
        if low > 0:
            # One byte before: if it is a line end, the line at ``low`` belongs to this shard.
            stream.seek(low - 1)
            _skip_line(stream, high - low + 1)
        elif stream.peek(3).startswith(BOM):
            stream.read(3)
        start = stream.tell()
        # A line after a byte order mark belongs to the shard with the mark's first byte.
        if start >= (high if low else file.n_bytes):
            return
        number = 1 + _n_lines_before(start, file, block_bytes)
        for line, n_bytes in iter_lines(stream):
            if isinstance(line, Reject) or not line.isspace():
                yield read_record(parse_object, line, file.path, number)
            number += 1
            start += n_bytes
            if start >= high:
                return
    raise reject_changed_file(file)


def iter_all(stream: io.BufferedReader, file: DataFile, _: ReadOptions) -> Iterator[RawRecord]:
    for number, line in _lines(stream):
        yield read_record(parse_object, line, file.path, number)


def iter_texts(
    stream: io.BufferedReader, file: DataFile, options: ReadOptions
) -> Iterator[RawRecord]:
    path = Path(file.path)

    def parse(piece: bytes) -> Fields:
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError as error:
            line = 1 + piece.count(b"\n", 0, error.start)
            detail = f"byte {piece[error.start]:#04x} on line {line} of the record; {UTF8_FIX}"
            raise Reject("not_utf8", detail, value=repr(piece[:60])) from error
        if "\0" in text:
            raise Reject("nul_character", "the text contains NUL", value=text)
        return {"text": text.replace("\r\n", "\n"), "name": path.name}

    if options.text_records == "file":
        content = stream.read(MAX_RECORD_BYTES + 1)
        if len(content) > MAX_RECORD_BYTES:
            raise too_long(path)
        yield read_record(parse, content, file.path, 1, "file")
        return
    for number, piece in _lines(stream):
        raw = piece if isinstance(piece, Reject) else piece.rstrip(b"\r\n")
        yield read_record(parse, raw, file.path, number)


def read_record(
    parse: Callable[[Any], Fields], raw: Any, path: str, number: int, unit: str = "line"
) -> RawRecord:
    try:
        if isinstance(raw, Reject):
            raise raw
        return RawRecord(path=path, number=number, unit=unit, value=parse(raw))
    except Reject as fault:
        # Release the text that the fault refers to.
        fault.__cause__ = fault.__context__ = None
        fault.__traceback__ = None
        return RawRecord(path=path, number=number, unit=unit, value=None, fault=fault)


def iter_lines(stream: io.BufferedReader) -> Iterator[tuple[bytes | Reject, int]]:
    for line in iter(partial(stream.readline, MAX_RECORD_BYTES + 1), b""):
        if len(line) > MAX_RECORD_BYTES and line[-1] != _NEWLINE:
            reject = Reject("record_too_large", f"over {MAX_RECORD_BYTES >> 20} MiB")
            yield reject, len(line) + _skip_line(stream)
        else:
            yield line, len(line)


def reject_changed_file(file: DataFile) -> DataError:
    return DataError(
        f"{file.path}: changed since it was fetched; restore it, or accept it: snakemake …"
        " --forcerun fetch_source"
    )


def too_long(path: Path) -> DataError:
    return DataError(
        f"{path}: over {MAX_RECORD_BYTES >> 20} MiB is too much for one record; set"
        " options.text_records to line"
    )


def count_lines(path: Path, block_bytes: int) -> tuple[tuple[int, ...], int]:
    n_newlines: list[int] = []
    n_blank = n_read = 0
    # The last line end and any whitespace after it.
    open_line = b"\n"
    with path.open("rb") as stream:
        while part := stream.read(min(BUFFER_BYTES, block_bytes - n_read % block_bytes)):
            if n_read % block_bytes == 0:
                n_newlines.append(0)
            n_newlines[-1] += part.count(b"\n")
            # A byte order mark is not part of the first line, which may be blank without it.
            text = part if n_read else part.removeprefix(BOM)
            n_read += len(part)
            n_blank += len(_BLANK_LINE.findall(open_line + text))
            last = text.rfind(b"\n")
            line = text[last:] if last >= 0 else open_line + text
            # A blank line may begin in one part and end in the next.
            open_line = line if line.isspace() and line[0] == _NEWLINE else b""
    return tuple(n_newlines), sum(n_newlines) - n_blank + (not open_line)


def _skip_line(stream: io.BufferedReader, n_bytes: int = _NO_END) -> int:
    n_read = 0
    while part := stream.readline(min(BUFFER_BYTES, n_bytes - n_read)):
        n_read += len(part)
        if part[-1] == _NEWLINE:
            break
    return n_read


def _n_lines_before(position: int, file: DataFile, block_bytes: int) -> int:
    """Count line ends before a byte, reading at most one block."""
    n_blocks = min(position // block_bytes, len(file.n_newlines))
    n_lines = sum(file.n_newlines[:n_blocks])
    with open_bytes(Path(file.path), None) as stream:
        start = stream.seek(n_blocks * block_bytes)
        while part := stream.read(min(BUFFER_BYTES, position - start)):
            start += len(part)
            n_lines += part.count(b"\n")
    return n_lines


def _lines(stream: io.BufferedReader) -> Iterator[tuple[int, bytes | Reject]]:
    for number, (line, _) in enumerate(iter_lines(stream), start=1):
        if isinstance(line, Reject) or not line.isspace():
            yield number, line
