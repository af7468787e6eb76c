"""Open a file as a stream of UTF-8 bytes, decompressed in constant memory.

Its first bytes are checked to find a wrong file name before any work starts.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError, single_line
from expertflow.data.records import Compression, FileFormat

BUFFER_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
BOM_NOTE = "starts with a byte order mark"
SUFFIXES: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
HEAD_BYTES = 1 << 16
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_CONVERT = "is UTF-16 or UTF-32; convert it to UTF-8, e.g. iconv -f UTF-16 -t UTF-8"
# What a misnamed file may start with, and the fix.
_FOREIGN = {
    _GZIP: "is gzip data, compressed twice; unpack it once",
    _ZSTD: "is zstd data, compressed twice; unpack it once",
    b"BZh": "is bzip2 data; unpack it",
    b"\xfd7zXZ": "is xz data; unpack it",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"version https://git-lfs": "is a Git LFS pointer, not the data; run git lfs pull",
    b"PAR1": "is Parquet data; rename it to {stem}.parquet",
    b"ARROW1": "is Arrow data; rename it to {stem}.arrow",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"), _CONVERT),
}
_COLUMNAR = {"parquet": (b"PAR1",), "arrow": (b"ARROW1", b"\xff\xff\xff\xff")}


def compression_of(head: bytes) -> Compression | None:
    if head.startswith(_GZIP):
        return "gzip"
    # A zstd file may start with a skippable frame.
    skippable = head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    return "zstd" if skippable or head.startswith(_ZSTD) else None


@contextmanager
def open_bytes(path: Path, compression: Compression | None) -> Iterator[io.BufferedReader]:
    """Open a file, decompressed; DataError if it cannot be read, now or in the block."""
    source: Any
    try:
        if compression is None:
            source = path.open("rb", buffering=0)
        elif compression == "gzip":
            source = gzip.open(path)  # noqa: SIM115
        else:
            import pyarrow as pa

            source = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
        with io.BufferedReader(source, BUFFER_BYTES) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        if reason := getattr(error, "strerror", None):
            raise DataError(
                f"{path}: cannot be read ({reason}); restore it or change its permissions"
            ) from error
        raise DataError(
            f"{path}: the {compression} data is damaged or ends early ({single_line(error)});"
            " fetch it again, or compress it again without --long"
        ) from error


@contextmanager
def open_text(path: Path, compression: Compression | None) -> Iterator[io.BufferedReader]:
    """Open a file without a byte order mark."""
    with open_bytes(path, compression) as stream:
        if stream.peek(3).startswith(BOM):
            stream.read(3)
        yield stream


def sniff_format(path: Path, kind: FileFormat, compression: Compression | None) -> tuple[str, ...]:
    """Return notes on anything unusual; DataError if a file is not what its name says."""
    with open_bytes(path, None) as stream:
        head = stream.read(HEAD_BYTES)
    found = compression_of(head)
    if found != compression:
        plain = path.stem if compression else path.name
        suffix = next((suffix for suffix, kind in SUFFIXES.items() if kind == found), "")
        raise DataError(
            f"{path}: is {found or f'not {compression}'} data; rename it to {plain}{suffix}, or"
            " fetch it again"
        )
    if compression is not None:
        with open_bytes(path, compression) as stream:
            head = stream.read(HEAD_BYTES)
    _check_content(path, kind, head)
    return (BOM_NOTE,) if head.startswith(BOM) and kind not in _COLUMNAR else ()


def _check_content(path: Path, kind: FileFormat, head: bytes) -> None:
    marks = _COLUMNAR.get(kind)
    if marks and head.startswith(marks):
        return
    for mark, message in _FOREIGN.items():
        if head.startswith(mark):
            raise DataError(f"{path}: {message.format(stem=path.stem)}")
    # Most texts start with ASCII, which UTF-16 and UTF-32 pad with NUL.
    if b"\0" in head[:4] and head[:4].strip(b"\0"):
        raise DataError(f"{path}: {_CONVERT}")
    if kind != "text" and head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise DataError(f"{path}: is an HTML page, perhaps an error; fetch the data again")
    if marks:
        raise DataError(f"{path}: cannot be opened as {kind.capitalize()}; fetch it again")
    if kind == "jsonl":
        _check_is_lines(path, head)


def _check_is_lines(path: Path, head: bytes) -> None:
    """Refuse JSON arrays and pretty-printed objects; the reader handles single bad lines."""
    first, _, rest = head.removeprefix(BOM).lstrip().partition(b"\n")
    first, rest = first.rstrip(), rest.lstrip()
    goes_on = first.endswith((b"[", b"{", b",")) or rest.startswith(b",")
    is_array = first.startswith(b"[") and (
        not rest.startswith(b"[") if goes_on else b"{" in first and rest[:1] not in (b"[", b"{")
    )
    is_indented = first.startswith(b"{") and goes_on and rest.startswith((b'"', b"}"))
    if is_array or is_indented:
        what = "a JSON array" if is_array else "pretty-printed JSON"
        name = path.name.lower().replace(".jsonl", ".json").replace(".ndjson", ".json")
        raise DataError(f"{path}: is {what}, not one object per line; rename it to {name}")
