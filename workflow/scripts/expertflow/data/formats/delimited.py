"""CSV and TSV: a header row, then one record per row; all values are text."""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator

from expertflow.core.errors import DataError
from expertflow.data.formats.lines import iter_lines, read_record
from expertflow.data.formats.options import MAX_RECORD_BYTES, ReadOptions
from expertflow.data.records import DataFile
from expertflow.data.reject import UTF8_FIX, RawRecord, Reject

Row = list[str] | Reject


def iter_all(
    stream: io.BufferedReader, file: DataFile, options: ReadOptions
) -> Iterator[RawRecord]:
    rows, names = read_header(stream, file, options)

    def parse(row: list[str]) -> dict[str, str]:
        if len(row) != len(names):
            found = f"{len(row)} values for {len(names)} columns"
            raise Reject("ragged_row", found, value=row[-1])
        return dict(zip(names, row, strict=True))

    for number, row in rows:
        yield read_record(parse, row, file.path, number)


def _rows(
    stream: io.BufferedReader, file: DataFile, options: ReadOptions
) -> Iterator[tuple[int, Row]]:
    """Yield each nonblank row with its first line number; DataError for an unclosed quote."""
    number, text = 0, ""
    faults: list[Reject] = []

    def decode() -> Iterator[str]:
        nonlocal number, text
        for line, _ in iter_lines(stream):
            number += 1
            if isinstance(line, Reject):
                faults.append(line)
                # A blank row takes its place, and its fault is reported there.
                yield "\n"
                continue
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                detail = f"{error.reason}; {UTF8_FIX}"
                faults.append(Reject("not_utf8", detail, value=repr(line[:60])))
                text = line.decode("utf-8", "replace")
            if "\0" in text:
                faults.append(Reject("nul_character", "the text contains NUL", value=text))
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
        faults.clear()
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
            if row or faults:
                yield first, faults[0] if faults else row


def read_header(
    stream: io.BufferedReader, file: DataFile, options: ReadOptions
) -> tuple[Iterator[tuple[int, Row]], list[str]]:
    """Return the rows below the header, and its names; DataError if it is unusable."""
    rows, path = _rows(stream, file, options), file.path
    for number, row in rows:
        if isinstance(row, Reject):
            why = row.detail or row.reason
            raise DataError(f"{path}, line {number}: the header cannot be read ({why}); correct it")
        if doubled := [name for name, n in Counter(row).items() if n > 1]:
            raise DataError(
                f"{path}, line {number}: two columns are named {doubled[0]!r}; the first row must"
                " give every column a unique name"
            )
        return rows, row
    raise DataError(f"{path}: there is no header row; the first row must name the columns")
