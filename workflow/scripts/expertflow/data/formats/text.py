"""Plain text: a file, a paragraph or a line is one record with the keys ``text`` and ``name``."""

import io
from collections.abc import Iterator
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.data.formats.lines import bounded_lines, faulty, too_large
from expertflow.data.formats.options import MAX_RECORD_BYTES, ReadOptions
from expertflow.data.formats.streams import open_utf8
from expertflow.data.records import DataFile
from expertflow.data.reject import RawRecord, Reject


def iter_all(file: DataFile, *, options: ReadOptions) -> Iterator[RawRecord]:
    """Yield the records of a file; numbers are lines, but for a whole file."""
    path = Path(file.path)
    with open_utf8(path, file.compression, options.encoding) as stream:
        if options.text_records == "file":
            pieces = _whole(stream, path)
        elif options.text_records == "paragraph":
            pieces = _paragraphs(stream)
        else:
            pieces = _lines(stream)
        unit = "file" if options.text_records == "file" else "line"
        for number, piece in pieces:
            try:
                value = {"text": _text(piece), "name": path.name}
            except Reject as fault:
                yield faulty(file.path, number, fault, unit=unit)
            else:
                yield RawRecord(path=file.path, number=number, unit=unit, value=value)


def _whole(stream: io.BufferedReader, path: Path) -> Iterator[tuple[int, bytes | None]]:
    raw = stream.read(MAX_RECORD_BYTES + 1)
    if len(raw) > MAX_RECORD_BYTES:
        raise too_long(path)
    yield 1, raw


def too_long(path: Path) -> DataError:
    """Say that a file cannot be one record."""
    return DataError(
        f"{path}: over {MAX_RECORD_BYTES >> 20} MiB are too much for one record; set"
        " options.text_records to paragraph or line"
    )


def _lines(stream: io.BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    for number, line in enumerate(bounded_lines(stream), start=1):
        if line is None or not line.isspace():
            yield number, line if line is None else line.rstrip(b"\r\n")


def _paragraphs(stream: io.BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Yield runs of lines that are not blank."""
    parts: list[bytes] = []
    first = n_bytes = 0
    for number, line in enumerate(bounded_lines(stream), start=1):
        if line is not None and line.isspace():
            if n_bytes:
                yield first, _joined(parts, n_bytes)
            parts, n_bytes = [], 0
            continue
        if not n_bytes:
            first = number
        n_bytes += MAX_RECORD_BYTES + 1 if line is None else len(line)
        if n_bytes > MAX_RECORD_BYTES:
            parts = []
        elif line is not None:
            parts.append(line)
    if n_bytes:
        yield first, _joined(parts, n_bytes)


def _joined(parts: list[bytes], n_bytes: int) -> bytes | None:
    return b"".join(parts).rstrip(b"\r\n") if n_bytes <= MAX_RECORD_BYTES else None


def _text(piece: bytes | None) -> str:
    if piece is None:
        raise too_large()
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + piece.count(b"\n", 0, error.start)
        detail = f"byte {piece[error.start]:#04x} on line {line} of it: {error.reason}"
        raise Reject("not_utf8", detail, value=repr(piece[:60])) from error
    if "\0" in text:
        raise Reject("nul_character", "NUL stands in the text", value=text)
    return text.replace("\r\n", "\n")
