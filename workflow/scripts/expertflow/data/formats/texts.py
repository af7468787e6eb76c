"""Records in UTF-8: JSON Lines, JSON, CSV, TSV and plain text.

Lines end at byte 0x0A only: ``str.splitlines`` would also break at U+2028, U+2029 and U+0085, legal
in JSON strings. CSV has a header row, and all its values are text. A text record is a file or a
line, with keys ``text`` and ``name``. JSON is an array of objects, or concatenated objects, read in
constant memory: an object is decoded once to find its end, and its bytes are then parsed as
strictly as a JSON line; a fault that hides where an object ends refuses the file.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.data.formats.streams import BOM, BUFFER_BYTES, open_bytes
from expertflow.data.parse import decode_text, parse_object
from expertflow.data.records import DataFile, Fields
from expertflow.data.reject import RawRecord, Reject
from expertflow.data.settings import ReadOptions

# Longer records are rejected unread: too long to train on.
MAX_RECORD_BYTES = 64 << 20
# Line ends of JSON Lines are counted per block, which locates a shard's first line.
BLOCK_BYTES = 16 << 20
_NEWLINE = 10
SEPARATORS = ";\t|,"
_NO_END = 1 << 62
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*(?=\n)")
_NOT_BLANK = re.compile(r"[^ \t\r\n]")
# Lenient, and without converting numbers: the strict parser judges what has an end.
_DECODER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)

# A record's first line with its content, or what is wrong with it.
Line = tuple[int, bytes | Reject]
Row = tuple[int, list[str] | Reject]


def iter_all(
    stream: io.BufferedReader, file: DataFile, options: ReadOptions
) -> Iterator[RawRecord]:
    parse: Callable[[Any], Fields] = parse_object
    found: Iterator[Line] | Iterator[Row]
    unit, name = "line", Path(file.path).name
    if file.format == "jsonl":
        found = _lines(stream)
    elif file.format == "json":
        found = _elements(stream, file.path)
    elif file.format == "text" and options.text_records == "line":
        parse, found = (lambda line: _parse_text(line.rstrip(b"\r\n"), name)), _lines(stream)
    elif file.format == "text":
        content = stream.read(MAX_RECORD_BYTES + 1)
        if len(content) > MAX_RECORD_BYTES:
            raise too_long(file.path)
        parse, found, unit = partial(_parse_text, name=name), iter([(1, content)]), "file"
    else:
        found, names = read_header(stream, file, options)
        parse = partial(_parse_row, names=names)
    for number, raw in found:
        yield read_record(parse, raw, file.path, number, unit)


def iter_range(file: DataFile, low: int, high: int) -> Iterator[RawRecord]:
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
        number = 1 + _n_lines_before(start, file)
        for line, n_bytes in _iter_lines(stream):
            if isinstance(line, Reject) or not line.isspace():
                yield read_record(parse_object, line, file.path, number)
            number += 1
            start += n_bytes
            if start >= high:
                return
    raise reject_changed_file(file)


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


def reject_changed_file(file: DataFile) -> DataError:
    return DataError(
        f"{file.path}: changed since it was fetched; restore it, or accept it: snakemake …"
        " --forcerun fetch_source"
    )


def too_long(path: str) -> DataError:
    return DataError(
        f"{path}: over {MAX_RECORD_BYTES >> 20} MiB is too much for one record; set"
        " options.text_records to line"
    )


def count_lines(path: Path) -> tuple[tuple[int, ...], int]:
    n_newlines: list[int] = []
    n_blank = n_read = 0
    # The last line end and any whitespace after it.
    open_line = b"\n"
    with path.open("rb") as stream:
        while part := stream.read(min(BUFFER_BYTES, BLOCK_BYTES - n_read % BLOCK_BYTES)):
            if n_read % BLOCK_BYTES == 0:
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


def _n_lines_before(position: int, file: DataFile) -> int:
    """Count line ends before a byte, reading at most one block."""
    n_blocks = min(position // BLOCK_BYTES, len(file.n_newlines))
    n_lines = sum(file.n_newlines[:n_blocks])
    with open_bytes(Path(file.path), None) as stream:
        start = stream.seek(n_blocks * BLOCK_BYTES)
        while part := stream.read(min(BUFFER_BYTES, position - start)):
            start += len(part)
            n_lines += part.count(b"\n")
    return n_lines


def _lines(stream: io.BufferedReader) -> Iterator[Line]:
    for number, (line, _) in enumerate(_iter_lines(stream), start=1):
        if isinstance(line, Reject) or not line.isspace():
            yield number, line


def _iter_lines(stream: io.BufferedReader) -> Iterator[tuple[bytes | Reject, int]]:
    """Yield each line with its size in bytes."""
    for line in iter(partial(stream.readline, MAX_RECORD_BYTES + 1), b""):
        if len(line) > MAX_RECORD_BYTES and line[-1] != _NEWLINE:
            reject = Reject("record_too_large", f"over {MAX_RECORD_BYTES >> 20} MiB")
            yield reject, len(line) + _skip_line(stream)
        else:
            yield line, len(line)


def _skip_line(stream: io.BufferedReader, n_bytes: int = _NO_END) -> int:
    n_read = 0
    while part := stream.readline(min(BUFFER_BYTES, n_bytes - n_read)):
        n_read += len(part)
        if part[-1] == _NEWLINE:
            break
    return n_read


def _parse_text(piece: bytes, name: str) -> Fields:
    return {"text": decode_text(piece).replace("\r\n", "\n"), "name": name}


def _elements(stream: io.BufferedReader, path: str) -> Iterator[Line]:
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
            # An element at the window's end may continue. Read as much again, so that a long object
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


def read_header(
    stream: io.BufferedReader, file: DataFile, options: ReadOptions
) -> tuple[Iterator[Row], list[str]]:
    """Return the rows below the header, and its names; DataError if it is unusable."""
    rows, path = _rows(stream, file, options), file.path
    for number, row in rows:
        try:
            names = _checked_row(row)
        except Reject as fault:
            why = fault.detail or fault.reason
            other = ", or set options.delimiter" if fault.reason == "not_csv" else ""
            raise DataError(
                f"{path}, line {number}: the header cannot be read ({why}); correct it{other}"
            ) from fault
        refuse_repeated_columns(f"{path}, line {number}", names)
        sign = next((sign for sign in SEPARATORS if sign in names[0]), None)
        if len(names) == 1 and sign and options.delimiter is None:
            # Some programs write such a line for Excel, above the header.
            fix = "remove this line, and set" if names[0].startswith("sep=") else "set"
            raise DataError(
                f"{path}, line {number}: {names[0][:60]!r} is the only column; {fix}"
                f" options.delimiter to what separates columns, such as {sign!r}"
            )
        return rows, names
    raise DataError(f"{path}: there is no header row; the first row must name the columns")


def refuse_repeated_columns(place: str, names: list[str]) -> None:
    if doubled := [name for name, n in Counter(names).items() if n > 1]:
        raise DataError(f"{place}: two columns are named {doubled[0]!r}; rename one")


def _checked_row(row: list[str] | Reject) -> list[str]:
    if isinstance(row, Reject):
        raise row
    text = "".join(row)
    if not text.isascii() or "\0" in text:
        decode_text(text.encode("utf-8", "surrogateescape"))
    return row


def _parse_row(row: list[str], names: list[str]) -> Fields:
    _checked_row(row)
    if len(row) != len(names):
        raise Reject("ragged_row", f"{len(row)} values for {len(names)} columns", value=row[-1])
    return dict(zip(names, row, strict=True))


def _rows(stream: io.BufferedReader, file: DataFile, options: ReadOptions) -> Iterator[Row]:
    """Yield each nonblank row with its first line number; DataError for an unclosed quote."""
    number, text = 0, ""

    def decode() -> Iterator[str]:
        nonlocal number, text
        for number, (line, _) in enumerate(_iter_lines(stream), start=1):
            if isinstance(line, Reject):
                raise DataError(f"{file.path}, line {number}: {line.detail}; shorten or correct it")
            # Bytes that are not UTF-8 stay, to reject only their row.
            text = line.decode("utf-8", "surrogateescape")
            yield text

    # Python's default limit is 131,072 characters per field.
    csv.field_size_limit(MAX_RECORD_BYTES)
    delimiter = options.delimiter or ("\t" if file.format == "tsv" else ",")
    lines = decode()
    # Strict, so that an unclosed quote is an error instead of swallowing the rest of the file.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)

    def ends_value(line: str) -> bool:
        _, quote, rest = line.rpartition('"')
        return bool(quote) and rest[:1] in f"{delimiter}\r\n"

    while True:
        first = number + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            is_closed = not re.search("unexpected end|field larger", str(error))
            if is_closed and (number > first or text.count('"') % 2):
                # A quote in a value is not doubled: the row ends where the last quote of a line
                # closes a value. Otherwise its lines would be read as rows.
                is_closed = ends_value(text) or any(map(ends_value, lines))
            if not is_closed:
                raise DataError(
                    f"{file.path}, line {first}: a quote opens here and is not closed by line"
                    f" {number}; close it, or fetch the file again"
                ) from error
            through = f", in the row on lines {first} to {number}" if number > first else ""
            yield first, Reject("not_csv", f"{error}{through}")
        else:
            if row:
                yield first, row
