"""A range of a split's rows, ``train[0:1000]``: the Parquet files with it, and the rows as Arrow.

Parquet files end with their row counts, so only the ends of other files are downloaded.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from expertflow.core.errors import DataError
from expertflow.core.files import replacing
from expertflow.data import cache

SLICE = re.compile(r"(?P<split>[^\[\]]+)\[(?P<start>\d*):(?P<end>\d*)\]")
# Enough for most footers.
FOOTER_BYTES = 1 << 16
BATCH_ROWS = 1000


class RowRange(NamedTuple):
    """Rows from ``start`` to before ``end``, counted from 0; None means to the last."""

    start: int
    end: int | None

    def __str__(self) -> str:
        return f"[{self.start}:{'' if self.end is None else self.end}]"


def parse_split(text: str) -> tuple[str, RowRange | None]:
    """Return a split's name and its range, if one is given as ``datasets`` writes it."""
    if "[" not in text:
        return text, None
    found = SLICE.fullmatch(text)
    rows = found and RowRange(int(found["start"] or 0), int(found["end"]) if found["end"] else None)
    if not found or not rows or (rows.end is not None and rows.end <= rows.start):
        raise DataError(f"split {text}: not a range of rows; write it as in train[0:1000]")
    return found["split"], rows


def narrow_builder(
    builder: Any, repository: str, folder: Path, split: str, rows: RowRange
) -> tuple[list[str], RowRange]:
    """Restrict a builder to the files with a range; return these, and the range within them.

    ``folder`` contains a commit's local files. Raises DataError if there are fewer rows.
    """
    if builder.name != "parquet":
        raise DataError(
            f"{repository} has {builder.name} files, but ranges of rows need Parquet files;"
            " remove the range, or try revision refs/convert/parquet"
        )
    files = builder.config.data_files[split]
    paths = {Path(file).relative_to(builder.base_path).as_posix(): file for file in files}
    chosen, n_before, n_skipped = {}, 0, 0
    for path, file in paths.items():
        if rows.end is not None and n_before >= rows.end:
            break
        n_rows = _count_rows(repository, folder, path)
        if n_before + n_rows > rows.start:
            chosen[path] = file
        else:
            n_skipped += n_rows
        n_before += n_rows
    if not chosen or (rows.end is not None and n_before < rows.end):
        raise DataError(f"{repository} has {n_before} rows in this split, not all of {rows}")
    # The library's own types, which record where each file comes from.
    kept = type(files)(list(chosen.values()), files.origin_metadata)
    builder.config.data_files = type(builder.config.data_files)({split: kept})
    return list(chosen), RowRange(rows.start - n_skipped, (rows.end or n_before) - n_skipped)


def _count_rows(repository: str, folder: Path, path: str) -> int:
    import pyarrow.parquet as pq
    from huggingface_hub import HfFileSystem

    if (folder / path).exists():
        return int(pq.read_metadata(folder / path).num_rows)
    place = f"datasets/{repository}@{folder.name}/{path}"
    # Parquet keeps the counts at a file's end, so about one block is downloaded.
    with HfFileSystem().open(place, block_size=FOOTER_BYTES) as file:
        return int(pq.read_metadata(file).num_rows)


def write_range(prepared: cache.Prepared, split: str, rows: RowRange, output: Path) -> None:
    """Write a range of a prepared split as its own prepared folder."""
    import pyarrow as pa

    streams = (pa.ipc.open_stream(pa.memory_map(str(path))) for path in prepared.files(split))
    table = pa.concat_tables(stream.read_all() for stream in streams)
    end = table.num_rows if rows.end is None else rows.end
    info: dict[str, Any] = json.loads((prepared.folder / cache.INFO).read_bytes())
    info["splits"] = {split: {"name": split, "num_examples": end - rows.start}}
    with replacing(output) as partial:
        partial.mkdir(parents=True)
        with pa.OSFile(str(partial / f"rows-{split}.arrow"), "wb") as sink:
            with pa.ipc.new_stream(sink, table.schema) as writer:
                # Batches of the same rows, whatever files they come from.
                for start in range(rows.start, end, BATCH_ROWS):
                    part = table.slice(start, min(BATCH_ROWS, end - start))
                    writer.write_table(part.combine_chunks())
        (partial / cache.INFO).write_text(json.dumps(info), encoding="utf-8")
