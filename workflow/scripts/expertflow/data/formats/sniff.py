"""Look at the first bytes of a file, so that a wrong name is found before any work starts."""

from pathlib import Path

from expertflow.core.errors import DataError
from expertflow.data.formats.streams import BOM, BOM_NOTE, compression_of, open_bytes
from expertflow.data.parse import parse_object
from expertflow.data.records import Compression, FileFormat
from expertflow.data.reject import Reject

HEAD_BYTES = 1 << 16
_UTF16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")
# What else such a file may turn out to be, and the way out.
_FOREIGN = {
    b"BZh": "is bzip2 data; unpack it",
    b"\xfd7zXZ": "is xz data; unpack it",
    b"PK\x03\x04": "is a zip archive; unpack it",
    b"SQLite format 3\0": "is an SQLite database; export its tables as .csv",
    b"version https://git-lfs": "is a Git LFS pointer, not the data; run git lfs pull",
    b"PAR1": "is Parquet data; name it {stem}.parquet",
    b"ARROW1": "is Arrow data; name it {stem}.arrow",
    b"FEA1": "is Feather version 1; write it again as .parquet",
}
_COLUMNAR = {"parquet": (b"PAR1",), "arrow": (b"ARROW1", b"\xff\xff\xff\xff")}


def sniff(path: Path, kind: FileFormat, compression: Compression | None) -> tuple[str, ...]:
    """Check that a file is what its name says; give notes on what is unusual.

    Raises:
        DataError: it is something else, or cannot be opened.
    """
    with open_bytes(path, None) as stream:
        packed = stream.read(HEAD_BYTES)
    found = compression_of(packed) if packed else None
    if found != compression:
        raise _misnamed(path, found)
    head = packed
    if compression is not None:
        with open_bytes(path, compression) as stream:
            head = stream.read(HEAD_BYTES)
        if inner := compression_of(head) if head else None:
            raise DataError(f"{path}: is {inner} data packed twice; unpack it once")
    _check_content(path, kind, head)
    return (BOM_NOTE,) if head.startswith(BOM) and kind not in _COLUMNAR else ()


def _misnamed(path: Path, found: Compression | None) -> DataError:
    known = path.suffix.lower() in (".gz", ".zst")
    plain = path.with_suffix("").name if known else path.name
    if found is None:
        kind = "gzip" if path.suffix.lower() == ".gz" else "zstd"
        return DataError(f"{path}: is no {kind} data; name it {plain}, or fetch it again")
    suffix = {"gzip": ".gz", "zstd": ".zst"}[found]
    return DataError(f"{path}: is {found} data; name it {plain}{suffix}")


def _check_content(path: Path, kind: FileFormat, head: bytes) -> None:
    marks = _COLUMNAR.get(kind)
    if marks and head.startswith(marks):
        return
    stem = path.stem
    for mark, message in _FOREIGN.items():
        if head.startswith(mark):
            raise DataError(f"{path}: {message.format(stem=stem)}")
    # Most texts begin with ASCII, which these encodings pad with NUL.
    if head.startswith(_UTF16_OR_32) or (b"\0" in head[:4] and head[:4].strip(b"\0")):
        raise DataError(
            f"{path}: is UTF-16 or UTF-32; convert it to UTF-8, e.g. iconv -f UTF-16 -t UTF-8"
        )
    if kind != "text" and head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise DataError(f"{path}: is an HTML page, perhaps of an error; fetch the data again")
    if marks:
        raise DataError(f"{path}: cannot be opened as {kind.capitalize()}; fetch it again")
    if kind == "jsonl":
        _check_is_lines(path, head)


def _check_is_lines(path: Path, head: bytes) -> None:
    """Refuse a JSON array and pretty-printed objects; single bad lines are the reader's matter."""
    first, _, rest = head.removeprefix(BOM).lstrip().partition(b"\n")
    rest = rest.lstrip()
    reason = _fault(first)
    is_array = first.startswith(b"[") and (
        (reason == "truncated" and not rest.startswith(b"["))
        or (reason == "not_an_object" and not rest and b"{" in first)
    )
    is_indented = reason == "truncated" and first.startswith(b"{") and rest[:1] in b'"}' and rest
    if is_array or is_indented:
        what = "a JSON array" if is_array else "pretty-printed JSON"
        name = path.name.lower().replace(".jsonl", ".json").replace(".ndjson", ".json")
        raise DataError(f"{path}: is {what}, not one object a line; name it {name}")


def _fault(line: bytes) -> str | None:
    try:
        parse_object(line)
    except Reject as reject:
        return reject.reason
    return None
