"""Write and read a bundle: a tar in which every byte follows from its index.

The index comes first, so a reader knows each header before reading it and refuses anything else.
"""

import hashlib
import json
import sys
import tarfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from expertflow.core.disk import check_space
from expertflow.core.errors import DataError
from expertflow.core.files import CHUNK_BYTES, canonical_json, replacing, sha256_text
from expertflow.core.records import from_json, to_json
from expertflow.rental.bundle.records import FORMAT, INDEX, BundleIndex, Member

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
MAX_INDEX_BYTES, MAX_LEVELS = 256 << 20, 40
# Most file systems limit names to 255 bytes; a path also has a working directory before it.
MAX_PART_BYTES, MAX_NAME_BYTES = 255, 1024
AGAIN = "copy or make the bundle again"

# Files to pack by member name, or bytes made on the fly.
Items = dict[str, Path | bytes]


def describe_items(items: Items) -> tuple[Member, ...]:
    return tuple(_pour(name, _chunks(items[name])) for name in sorted(items))


def write_bundle(path: Path, index: BundleIndex, items: Items) -> None:
    """Write a bundle; raise DataError if a file has changed, or its name is not portable."""
    _check_names(index, path)
    needed = sum(member.n_bytes for member in index.members)
    check_space([(path, needed, path.name)])
    value = to_json(index)
    sealed = canonical_json({"index": value, "sha256": sha256_text(canonical_json(value))}).encode()
    with replacing(path) as partial, partial.open("wb") as stream:
        stream.write(_header(INDEX, len(sealed)) + sealed + _padding(len(sealed)))
        for member in index.members:
            stream.write(_header(member.name, member.n_bytes))
            # Read twice, for the index and for the file: what differs was written meanwhile.
            if _pour(member.name, _chunks(items[member.name]), stream.write) != member:
                raise DataError(f"{member.name}: changed while it was packed; run again")
            stream.write(_padding(member.n_bytes))
        stream.write(END)


def read_index(path: Path) -> BundleIndex:
    """Read a bundle's index; raise DataError if it is missing or was changed."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; correct the path")
    with path.open("rb") as stream:
        return _read_index(stream, path)


def read_bundle(path: Path, index: BundleIndex, create: Callable[[Member], BinaryIO]) -> None:
    """Read a bundle into the files of ``create``; raise DataError if a byte differs."""
    with path.open("rb") as stream:
        if _read_index(stream, path) != index:
            raise DataError(f"{path}: was replaced while it was opened; open it again")
        for member in index.members:
            _expect(stream, _header(member.name, member.n_bytes), path, member.name)
            with create(member) as target:
                # Written first and judged then: it lies in a partial folder until all is right.
                found = _pour(member.name, _take(stream, member.n_bytes), target.write)
            if found.n_bytes != member.n_bytes:
                raise DataError(f"{path}: ends within {member.name}; {AGAIN}")
            if found != member:
                raise DataError(f"{path}: {member.name} was changed; {AGAIN}")
            _expect(stream, _padding(member.n_bytes), path, member.name)
        _expect(stream, END, path, "its end")
        # Bytes behind the end would be of no hash.
        if stream.read(1):
            raise DataError(f"{path}: goes on after its end; {AGAIN}")


def parse_json(text: bytes, where: str) -> Any:
    """Parse JSON from a bundle; raise DataError if it is damaged, or would overflow the stack."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is damaged ({error}); {AGAIN}") from error
    if not _is_shallow(value, MAX_LEVELS):
        raise DataError(f"{where}: is nested deeper than {MAX_LEVELS} levels; {AGAIN}")
    return value


def is_inside(name: str, expert: str) -> bool:
    """Return whether a name leads to a file below an expert's results, on any file system."""
    parts = name.split("/")
    is_plain = all(
        part.isprintable()
        and part not in ("", ".", "..")
        and len(part.encode()) <= MAX_PART_BYTES
        and "\\" not in part
        for part in parts
    )
    has_place = len(parts) > 2 and parts[:2] == ["results", expert]
    return is_plain and has_place and len(name.encode()) <= MAX_NAME_BYTES


def _chunks(content: Path | bytes) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as stream:
        yield from _take(stream, sys.maxsize)


def _take(stream: BinaryIO, n_bytes: int) -> Iterator[bytes]:
    # In pieces: a member may be larger than memory.
    while chunk := stream.read(min(n_bytes, CHUNK_BYTES)):
        n_bytes -= len(chunk)
        yield chunk


def _pour(
    name: str, chunks: Iterable[bytes], write: Callable[[bytes], object] = lambda _: None
) -> Member:
    n_bytes, digest = 0, hashlib.sha256()
    for chunk in chunks:
        write(chunk)
        n_bytes += len(chunk)
        digest.update(chunk)
    return Member(name=name, n_bytes=n_bytes, sha256=digest.hexdigest())


def _header(name: str, n_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = n_bytes, 0o644, 0
    # PAX, as names may be longer than 100 bytes and in UTF-8.
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _padding(n_bytes: int) -> bytes:
    # 5 bytes in blocks of 512 -> 507 zeros
    return bytes(-n_bytes % BLOCK)


def _read_index(stream: BinaryIO, path: Path) -> BundleIndex:
    header = stream.read(BLOCK)
    try:
        n_bytes = tarfile.TarInfo.frombuf(header, "utf-8", "strict").size
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is no bundle; make one with make_bundle") from error
    # The whole header is made anew and compared: owner, mode and time have one value.
    if not 0 <= n_bytes <= MAX_INDEX_BYTES or header != _header(INDEX, n_bytes):
        raise DataError(f"{path}: is no bundle, as {INDEX} does not come first; {AGAIN}")
    text, where = stream.read(n_bytes), f"{path}: {INDEX}"
    _expect(stream, _padding(n_bytes), path, INDEX)
    sealed = parse_json(text, where)
    value = sealed.get("index") if isinstance(sealed, dict) else None
    if not isinstance(value, dict):
        raise DataError(f"{where} is damaged; {AGAIN}")
    if value.get("format") != FORMAT:
        raise DataError(
            f"{path}: is a bundle of format {value.get('format')!r} and this code reads {FORMAT};"
            " open it with the code that made it"
        )
    try:
        # As text, not as values: another spelling of the same JSON was written by somebody else.
        own = canonical_json(value)
        is_sealed = text == canonical_json({"index": value, "sha256": sha256_text(own)}).encode()
    except ValueError as error:
        raise DataError(f"{where} is damaged ({error}); {AGAIN}") from error
    if not is_sealed:
        raise DataError(f"{where} was changed; {AGAIN}")
    index: BundleIndex = from_json(BundleIndex, value, where=where)
    _check_names(index, path)
    return index


def _is_shallow(value: Any, n_levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return n_levels > 0 and all(_is_shallow(each, n_levels - 1) for each in inside)


def _check_names(index: BundleIndex, path: Path) -> None:
    names = [member.name for member in index.members]
    if not is_inside(f"results/{index.expert}/x", index.expert):
        raise DataError(f"{path}: {index.expert!r:.80} is no name of an expert; {AGAIN}")
    if odd := [name for name in names if not is_inside(name, index.expert)]:
        raise DataError(
            f"{path}: member {odd[0]!r:.120} does not lie in results/{index.expert}, or has a name"
            f" that not every file system takes; {AGAIN}"
        )
    if names != sorted(set(names)) or any(member.n_bytes < 0 for member in index.members):
        raise DataError(f"{path}: its members are out of order or repeated; {AGAIN}")
    # A file system that ignores case or Unicode form would overwrite one with the other.
    plain = {unicodedata.normalize("NFKC", name).casefold() for name in names}
    folders = {str(parent) for name in plain for parent in PurePosixPath(name).parents}
    if len(plain) != len(names) or plain & folders:
        raise DataError(f"{path}: two of its members have one place; {AGAIN}")


def _expect(stream: BinaryIO, wanted: bytes, path: Path, name: str) -> None:
    if stream.read(len(wanted)) != wanted:
        raise DataError(f"{path}: {name} is not as the index says; {AGAIN}")
