"""Write files completely or not at all, and hash their content."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> str:
    """Serialize equal values to equal text: sorted keys, no blanks, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def sha256_text(text: str) -> str:
    """Hash text as UTF-8, including lone surrogates, which are legal in JSON strings."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_json(value: Any) -> str:
    return sha256_text(canonical_json(value))


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_directory(path: Path) -> str:
    """Hash the names and contents of all files below a directory, in a fixed order."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return sha256_json([[p.relative_to(path).as_posix(), sha256_file(p)] for p in files])


def sidecar_of(output: Path) -> Path:
    """Return the path of the sidecar that records what an output was made from."""
    return output.with_name(f".{output.name}.fingerprint")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` only if the block succeeds.

    Works for files and directories. A failure leaves nothing behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    remove(partial)
    try:
        yield partial
        sync(partial)
        if path.is_dir() and not path.is_symlink():
            remove(path)
        partial.replace(path)
        sync_directory(path.parent)
    finally:
        remove(partial)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_text_if_changed(path: Path, text: str) -> bool:
    """Write only if the content differs, so that an unchanged file keeps its time stamp."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    write_text(path, text)
    return True


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a log of JSON objects, one per line, without lines truncated by a crash."""
    values = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            values.append(json.loads(line))
    return values


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it across file systems."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def link_or_copy_tree(source: Path, target: Path) -> None:
    """Recreate a directory under another name with hard links where possible."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link_or_copy(path, target / path.relative_to(source))


def sync(path: Path) -> None:
    """Flush a file, or every file below a directory, to disk."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's entries, so that a rename survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
