"""Parquet and Arrow: one record per row, cut by rows."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from expertflow.core.errors import DataError
from expertflow.core.strict_json import iter_values
from expertflow.data.formats.texts import read_record, refuse_repeated_columns
from expertflow.data.records import DataFile, Fields
from expertflow.data.reject import RawRecord, Reject

BATCH_ROWS = 500


def iter_range(file: DataFile, low: int, high: int) -> Iterator[RawRecord]:
    """Yield the rows in bytes [low, high), as if all rows had the same size."""
    n_rows = count_rows(Path(file.path), file.format) if file.n_records is None else file.n_records
    # Row r of n is at byte size * r // n, so this is the first at or after `low`.
    first, stop = (-(-byte * n_rows // file.n_bytes) for byte in (low, high))
    with _readable(file.path, file.format):
        for number, batch in _batches(file, first, stop):
            yield from _records(file.path, number, batch)


def count_rows(path: Path, file_format: str) -> int:
    """Count rows from metadata; DataError if the file does not open or repeats a column name."""
    with _readable(str(path), file_format):
        if file_format == "parquet":
            with pq.ParquetFile(path) as parquet:
                names, n_rows = parquet.schema_arrow.names, parquet.metadata.num_rows
        else:
            with pa.memory_map(str(path)) as source, _arrow_batches(source) as (schema, batches):
                names, n_rows = schema.names, sum(batch.num_rows for batch in batches)
    refuse_repeated_columns(str(path), names)
    return int(n_rows)


@contextmanager
def _readable(path: str, file_format: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        why = str(error).split("\n")[0].rstrip(".")
        raise DataError(
            f"{path}: cannot be read as {file_format.capitalize()} ({why}); fetch or write it again"
        ) from error


def _batches(file: DataFile, first: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    with ExitStack() as stack:
        if file.format == "parquet":
            start, batches = _parquet_batches(file.path, first, stop, stack)
        else:
            source = stack.enter_context(pa.memory_map(file.path))
            start, batches = 0, stack.enter_context(_arrow_batches(source))[1]
        for batch in batches:
            # An offset out of range would kill the process without a message.
            for column in batch.columns:
                column.view(_as_bytes(column.type)).validate(full=True)
            # Arrow files are read from their start, so batches before the shard's rows yield
            # nothing.
            low, high = max(first - start, 0), min(stop - start, batch.num_rows)
            for row in range(low, high, BATCH_ROWS):
                yield start + row + 1, batch.slice(row, min(BATCH_ROWS, high - row))
            start += batch.num_rows
            if start >= stop:
                return


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Return a type with bytes as values, so that a bad text or date later rejects only its row."""

    def of_field(field: pa.Field) -> pa.Field:
        return field.with_type(_as_bytes(field.type))

    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return pa.binary(kind.bit_width // 8)
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.list_(of_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(of_field(kind.value_field))
    return pa.struct([of_field(one) for one in kind]) if pa.types.is_struct(kind) else kind


def _parquet_batches(
    path: str, first: int, stop: int, stack: ExitStack
) -> tuple[int, Iterator[pa.RecordBatch]]:
    # No pre-buffering, which would hold entire row groups.
    parquet = stack.enter_context(pq.ParquetFile(path, memory_map=True, pre_buffer=False))
    sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    ends = list(accumulate(sizes))
    groups = [i for i, end in enumerate(ends) if end > first and end - sizes[i] < stop]
    # Only row groups with some of the rows are opened; the first may begin earlier.
    start = ends[groups[0]] - sizes[groups[0]] if groups else 0
    return start, parquet.iter_batches(BATCH_ROWS, row_groups=groups)


@contextmanager
def _arrow_batches(
    source: pa.NativeFile,
) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open Arrow's file or stream format; the hub's cache has streams."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if is_file:
        with pa.ipc.open_file(source) as reader:
            indices = range(reader.num_record_batches)
            yield reader.schema, (reader.get_batch(i) for i in indices)
    else:
        with pa.ipc.open_stream(source) as reader:
            yield reader.schema, iter(reader)


def _has_floats(kind: pa.DataType) -> bool:
    # Arrow counts the fields of a map's type, but not those of a tensor's or dictionary's values.
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    parts = (kind.field(i).type for i in range(kind.num_fields))
    return pa.types.is_floating(kind) or any(map(_has_floats, parts))


def _records(path: str, number: int, batch: pa.RecordBatch) -> Iterator[RawRecord]:
    floats = [field.name for field in batch.schema if _has_floats(field.type)]

    def parse(value: Fields) -> Fields:
        for name in floats:
            # Numbers at any depth, as in JSON Lines: orjson would write these as null.
            for item in iter_values(value[name]):
                if isinstance(item, float) and not math.isfinite(item):
                    raise Reject("not_finite", "not a finite number", field=name, value=item)
        return value

    for row, value in enumerate(_rows(batch), start=number):
        yield read_record(parse, value, path, row, "row")


def _rows(batch: pa.RecordBatch) -> list[Fields | Reject]:
    """Convert to Python; on failure row by row, to find values without a Python equivalent."""
    try:
        values: list[Fields | Reject] = batch.to_pylist()
        return values
    except (OverflowError, ValueError):
        if batch.num_rows > 1:
            return [row for i in range(batch.num_rows) for row in _rows(batch.slice(i, 1))]
    for field in batch.schema:
        try:
            batch.column(field.name).to_pylist()
        except UnicodeDecodeError as error:
            shown = repr(error.object[:60])
            return [Reject("not_utf8", error.reason, field=field.name, value=shown)]
        except (OverflowError, ValueError) as error:
            fault = f"a {field.type} out of range ({error})"
            return [Reject("not_json", fault, field=field.name)]
    raise AssertionError("a row fails although all of its columns pass")
