"""CSV and TSV: a header row, then one record a row; every value is a text."""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.data.formats.lines import bounded_lines, read_record
from expertflow.data.formats.options import MAX_RECORD_BYTES, ReadOptions
from expertflow.data.formats.streams import open_utf8
from expertflow.data.records import DataFile
from expertflow.data.reject import RawRecord, Reject


def iter_all(file: DataFile, *, options: ReadOptions) -> Iterator[RawRecord]:
    with open_utf8(Path(file.path), file.compression, options.encoding) as stream:
        rows = _Rows(stream, file, options)
        names = _header(rows, file.path)
        for number, row in rows:
            fault = rows.faults[0] if rows.faults else None
            yield read_record(partial(_value, names=names), fault or row, file.path, number)


def check_header(file: DataFile, *, options: ReadOptions) -> None:
    with open_utf8(Path(file.path), file.compression, options.encoding) as stream:
        _header(_Rows(stream, file, options), file.path)


class _Rows:
    """Rows with the line each starts on, or what is wrong with one; blank rows are left out."""

    def __init__(self, stream: io.BufferedReader, file: DataFile, options: ReadOptions) -> None:
        comma = "\t" if file.format == "tsv" else ","
        self.faults: list[Reject] = []
        self._lines = bounded_lines(stream)
        self._number = 0
        self._path = file.path
        csv.field_size_limit(MAX_RECORD_BYTES)
        # Strict, so that an open quote is an error and does not swallow the rest in silence.
        self._reader = csv.reader(
            self._decoded(), delimiter=options.delimiter or comma, strict=True
        )

    def __iter__(self) -> Iterator[tuple[int, list[str] | Reject]]:
        while True:
            first = self._number + 1
            self.faults.clear()
            try:
                row = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield first, self._fault(first, str(error))
            else:
                if row or self.faults:
                    yield first, row

    def _fault(self, first: int, message: str) -> Reject:
        # A quote that is not closed swallows all rows below it: that is no matter of one record.
        if "unexpected end" in message or "field larger" in message:
            raise DataError(
                f"{self._path}, line {first}: a quote opens and is not closed by line"
                f" {self._number}; mend it, or fetch the file again"
            )
        return Reject("not_csv", message)

    def _decoded(self) -> Iterator[str]:
        for line, _ in self._lines:
            self._number += 1
            if isinstance(line, Reject):
                self.faults.append(line)
                yield "\n"
                continue
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                self.faults.append(Reject("not_utf8", str(error.reason), value=repr(line[:60])))
                text = line.decode("utf-8", "replace")
            if "\0" in text:
                self.faults.append(Reject("nul_character", "NUL stands in the text", value=text))
            yield text


def _value(row: list[str], names: list[str]) -> dict[str, str]:
    if len(row) != len(names):
        found = f"{len(row)} values for {len(names)} columns"
        raise Reject("ragged_row", found, value=row[-1])
    return dict(zip(names, row, strict=True))


def _header(rows: _Rows, path: str) -> list[str]:
    for number, row in rows:
        if isinstance(row, Reject) or rows.faults:
            why = row.detail if isinstance(row, Reject) else rows.faults[0].reason
            raise DataError(f"{path}, line {number}: the header cannot be read ({why}); mend it")
        if doubled := [name for name, n in Counter(row).items() if n > 1]:
            raise DataError(
                f"{path}, line {number}: two columns are named {doubled[0]!r}; the first row must"
                " give every column a name of its own"
            )
        return row
    raise DataError(f"{path}: there is no header row; the first row must name the columns")
