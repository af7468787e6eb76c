"""Write and read a bundle: a tar of which every byte follows from its index.

The index comes first, so that a reader knows each header before it reads it. What is not exactly
the one tar that the index describes is refused: a changed byte anywhere, a link, a device, a name
that leads elsewhere, something before, between or after. Any tar program can unpack it.
"""

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from expertflow.core.errors import DataError
from expertflow.core.files import CHUNK_BYTES, canonical_json, replacing, sha256_text
from expertflow.core.records import from_json, to_json
from expertflow.rental.bundle.records import FORMAT, INDEX, BundleIndex, Member

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
MAX_INDEX_BYTES = 256 << 20

Content = Path | bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Something to pack: a file, or bytes made on the way."""

    content: Content
    brought: bool = False


def describe(items: dict[str, Item]) -> tuple[Member, ...]:
    """Measure and hash what is to be packed, in the order of the names."""
    return tuple(
        Member(name=name, n_bytes=n_bytes, sha256=sha256, brought=items[name].brought)
        for name in sorted(items)
        for n_bytes, sha256 in [_measure(items[name].content)]
    )


def write_bundle(path: Path, index: BundleIndex, items: dict[str, Item]) -> None:
    """Write a bundle whole or not at all.

    Raises:
        DataError: a file changed since it was described.
    """
    text = _index_text(index)
    with replacing(path) as partial, partial.open("wb") as stream:
        _write_member(stream, INDEX, len(text), [text])
        for member in index.members:
            content = items[member.name].content
            n_bytes, sha256 = _write_member(stream, member.name, member.n_bytes, _chunks(content))
            if (n_bytes, sha256) != (member.n_bytes, member.sha256):
                raise DataError(f"{content!s:.200}: changed while it was packed; run again")
        stream.write(END)


def read_index(path: Path) -> BundleIndex:
    """Read a bundle's index, and check that it is whole.

    Raises:
        DataError: this is no bundle, or its index was changed.
    """
    try:
        with path.open("rb") as stream:
            return _read_index(stream, path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such bundle; correct the path") from error


def read_bundle(
    path: Path, index: BundleIndex, receive: Callable[[Member], BinaryIO | None]
) -> str:
    """Read a bundle once, checking every byte; give its hash.

    ``index`` is the one that was read before, by which it was decided to open it. ``receive`` gives
    what to write a member to, or None where checking is enough.

    Raises:
        DataError: a byte differs from what the index says.
    """
    with path.open("rb") as file:
        stream = _Hashing(file)
        if _read_index(stream, path) != index:
            raise DataError(f"{path}: was replaced while it was opened; open it again")
        for member in index.members:
            _expect(stream, _header(member.name, member.n_bytes), path, member.name)
            target = receive(member)
            try:
                _copy(stream, member, target, path)
            finally:
                if target is not None:
                    target.close()
        _expect(stream, END, path, "its end")
        if stream.read(1):
            raise DataError(f"{path}: goes on after its end; {_AGAIN}")
        return stream.digest.hexdigest()


_AGAIN = "copy or make the bundle again"


class _Hashing:
    """A stream that hashes what is read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.digest = stream, hashlib.sha256()

    def read(self, n_bytes: int) -> bytes:
        chunk = self._stream.read(n_bytes)
        self.digest.update(chunk)
        return chunk


def _measure(content: Content) -> tuple[int, str]:
    n_bytes, digest = 0, hashlib.sha256()
    for chunk in _chunks(content):
        n_bytes += len(chunk)
        digest.update(chunk)
    return n_bytes, digest.hexdigest()


def _chunks(content: Content) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _header(name: str, n_bytes: int) -> bytes:
    """Give the one header that a member of this name and size has."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = n_bytes, 0o644, 0
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _padding(n_bytes: int) -> bytes:
    return bytes(-n_bytes % BLOCK)


def _write_member(
    stream: BinaryIO, name: str, n_bytes: int, chunks: Iterable[bytes]
) -> tuple[int, str]:
    stream.write(_header(name, n_bytes))
    n_written, digest = 0, hashlib.sha256()
    for chunk in chunks:
        stream.write(chunk)
        n_written += len(chunk)
        digest.update(chunk)
    stream.write(_padding(n_bytes))
    return n_written, digest.hexdigest()


def _index_text(index: BundleIndex) -> bytes:
    """Write the index with its own hash, so that a changed byte of it shows, too."""
    value = to_json(index)
    return canonical_json({"index": value, "sha256": sha256_text(canonical_json(value))}).encode()


def _read_index(stream: BinaryIO | _Hashing, path: Path) -> BundleIndex:
    header = stream.read(BLOCK)
    try:
        n_bytes = tarfile.TarInfo.frombuf(header, "utf-8", "strict").size
    except tarfile.HeaderError as error:
        raise DataError(f"{path}: is no bundle; make one with make_bundle") from error
    if not 0 <= n_bytes <= MAX_INDEX_BYTES or header != _header(INDEX, n_bytes):
        raise DataError(f"{path}: is no bundle, as {INDEX} does not come first; {_AGAIN}")
    text = _take(stream, n_bytes, path, INDEX)
    _expect(stream, _padding(n_bytes), path, INDEX)
    try:
        value = json.loads(text)["index"]
        whole = value["format"] != FORMAT or _is_canonical(text, value)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: {INDEX} is damaged ({error}); {_AGAIN}") from error
    if not whole:
        raise DataError(f"{path}: {INDEX} was changed; {_AGAIN}")
    if value["format"] != FORMAT:
        raise DataError(
            f"{path}: is a bundle of format {value['format']!r} and this code reads {FORMAT}; open"
            " it with the code that made it"
        )
    index: BundleIndex = from_json(BundleIndex, value, where=INDEX)
    _check_names(index, path)
    return index


def _is_canonical(text: bytes, value: object) -> bool:
    own = canonical_json(value)
    return text == canonical_json({"index": value, "sha256": sha256_text(own)}).encode()


def _check_names(index: BundleIndex, path: Path) -> None:
    """Let every member lie below its expert's results, and none in the place of another's folder.

    Raises:
        DataError: one does not.
    """
    names = [member.name for member in index.members]
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if "/" in index.expert or index.expert in ("", ".", ".."):
        raise DataError(f"{path}: {index.expert!r} is no name of an expert; {_AGAIN}")
    for name in names:
        parts = name.split("/")
        inside = len(parts) > 2 and parts[:2] == ["results", index.expert]
        odd = any(part in ("", ".", "..") or not part.isprintable() for part in parts)
        if not inside or odd or name in folders:
            raise DataError(
                f"{path}: member {name!r} does not lie in results/{index.expert}; {_AGAIN}"
            )
    if names != sorted(set(names)) or any(member.n_bytes < 0 for member in index.members):
        raise DataError(f"{path}: its members are out of order or repeated; {_AGAIN}")


def _copy(stream: BinaryIO | _Hashing, member: Member, target: BinaryIO | None, path: Path) -> None:
    digest, left = hashlib.sha256(), member.n_bytes
    while left:
        chunk = stream.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise DataError(f"{path}: ends within {member.name}; {_AGAIN}")
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        left -= len(chunk)
    _expect(stream, _padding(member.n_bytes), path, member.name)
    if digest.hexdigest() != member.sha256:
        raise DataError(f"{path}: {member.name} was changed; {_AGAIN}")


def _take(stream: BinaryIO | _Hashing, n_bytes: int, path: Path, name: str) -> bytes:
    found = stream.read(n_bytes)
    if len(found) != n_bytes:
        raise DataError(f"{path}: ends within {name}; {_AGAIN}")
    return found


def _expect(stream: BinaryIO | _Hashing, wanted: bytes, path: Path, name: str) -> None:
    if stream.read(len(wanted)) != wanted:
        raise DataError(f"{path}: {name} is not as the index says; {_AGAIN}")
