"""Open a file as a stream of UTF-8 bytes, decompressed in constant memory.

Its first bytes are checked to find a wrong file name before any work starts.
"""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.data.parse import parse_object
from expertflow.data.records import Compression, FileFormat
from expertflow.data.reject import Reject

BUFFER_BYTES = 1 << 20
_UNPACKED_BYTES = 1 << 16
BOM = b"\xef\xbb\xbf"
BOM_NOTE = "starts with a byte order mark"
SUFFIXES: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
HEAD_BYTES = 1 << 16
_UTF16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")
# Other formats that a misnamed file may have, and the fix.
_FOREIGN = {
    b"BZh": "is bzip2 data; unpack it",
    b"\xfd7zXZ": "is xz data; unpack it",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"version https://git-lfs": "is a Git LFS pointer, not the data; run git lfs pull",
    b"PAR1": "is Parquet data; rename it to {stem}.parquet",
    b"ARROW1": "is Arrow data; rename it to {stem}.arrow",
}
_COLUMNAR = {"parquet": (b"PAR1",), "arrow": (b"ARROW1", b"\xff\xff\xff\xff")}


def compression_of(head: bytes) -> Compression | None:
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    # A zstd file may start with a skippable frame.
    skippable = head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    return "zstd" if skippable or head.startswith(b"\x28\xb5\x2f\xfd") else None


def open_bytes(path: Path, compression: Compression | None) -> io.BufferedReader:
    """Open a file, decompressed; DataError if it cannot be read, now or later."""
    try:
        if compression is None:
            return io.BufferedReader(path.open("rb", buffering=0), BUFFER_BYTES)
        source: Any
        if compression == "gzip":
            source = gzip.open(path)  # noqa: SIM115
        else:
            import pyarrow as pa

            source = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); restore it or change its permissions"
        ) from error
    return io.BufferedReader(_Unpacked(path, compression, source), BUFFER_BYTES)


def open_text(path: Path, compression: Compression | None) -> io.BufferedReader:
    """Open a file without a byte order mark."""
    stream = open_bytes(path, compression)
    if stream.peek(3).startswith(BOM):
        stream.read(3)
    return stream


class _Unpacked(io.RawIOBase):
    """Unpacked data as a raw stream, whose errors state the line."""

    def __init__(self, path: Path, compression: Compression, source: Any) -> None:
        super().__init__()
        self._path, self._compression, self._source = path, compression, source
        self._n_lines = 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._source.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        try:
            # read1 returns what is unpacked so far; read would lose it if the data is damaged.
            data = self._source.read1(min(len(buffer), _UNPACKED_BYTES))
        except (OSError, EOFError, zlib.error) as error:
            place, why = f"after line {self._n_lines}", str(error)
            if isinstance(error, EOFError) or why.startswith("Truncated"):
                fix = "the download is incomplete, fetch it again"
                raise DataError(f"{self._path}: ends early {place}; {fix}") from error
            fix = "compress it again without --long" if "too much" in why else "fetch it again"
            raise DataError(
                f"{self._path}: the {self._compression} data is damaged {place} ({why}); {fix}"
            ) from error
        self._n_lines += data.count(b"\n")
        buffer[: len(data)] = data
        return len(data)


def sniff_format(path: Path, kind: FileFormat, compression: Compression | None) -> tuple[str, ...]:
    """Return notes on anything unusual; DataError if a file is not what its name says."""
    with open_bytes(path, None) as stream:
        packed = stream.read(HEAD_BYTES)
    found = compression_of(packed) if packed else None
    if found != compression:
        named = SUFFIXES.get(path.suffix.lower())
        plain = path.with_suffix("").name if named else path.name
        if found is None:
            raise DataError(f"{path}: is not {named} data; rename it to {plain}, or fetch it again")
        suffix = next(suffix for suffix, kind in SUFFIXES.items() if kind == found)
        raise DataError(f"{path}: is {found} data; rename it to {plain}{suffix}")
    head = packed
    if compression is not None:
        with open_bytes(path, compression) as stream:
            head = stream.read(HEAD_BYTES)
        if inner := compression_of(head) if head else None:
            raise DataError(f"{path}: is {inner} data compressed twice; unpack it once")
    _check_content(path, kind, head)
    return (BOM_NOTE,) if head.startswith(BOM) and kind not in _COLUMNAR else ()


def _check_content(path: Path, kind: FileFormat, head: bytes) -> None:
    marks = _COLUMNAR.get(kind)
    if marks and head.startswith(marks):
        return
    for mark, message in _FOREIGN.items():
        if head.startswith(mark):
            raise DataError(f"{path}: {message.format(stem=path.stem)}")
    # Most texts start with ASCII, which these encodings pad with NUL.
    if head.startswith(_UTF16_OR_32) or (b"\0" in head[:4] and head[:4].strip(b"\0")):
        raise DataError(
            f"{path}: is UTF-16 or UTF-32; convert it to UTF-8, e.g. iconv -f UTF-16 -t UTF-8"
        )
    if kind != "text" and head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise DataError(f"{path}: is an HTML page, perhaps an error; fetch the data again")
    if marks:
        raise DataError(f"{path}: cannot be opened as {kind.capitalize()}; fetch it again")
    if kind == "jsonl":
        _check_is_lines(path, head)


def _check_is_lines(path: Path, head: bytes) -> None:
    """Refuse JSON arrays and pretty-printed objects; the reader handles single bad lines."""
    first, _, rest = head.removeprefix(BOM).lstrip().partition(b"\n")
    rest, reason = rest.lstrip(), None
    try:
        parse_object(first)
    except Reject as reject:
        reason = reject.reason
    is_array = first.startswith(b"[") and (
        (reason == "truncated" and not rest.startswith(b"["))
        or (reason == "not_an_object" and not rest and b"{" in first)
    )
    is_indented = reason == "truncated" and first.startswith(b"{") and rest[:1] in b'"}' and rest
    if is_array or is_indented:
        what = "a JSON array" if is_array else "pretty-printed JSON"
        name = path.name.lower().replace(".jsonl", ".json").replace(".ndjson", ".json")
        raise DataError(f"{path}: is {what}, not one object per line; rename it to {name}")
