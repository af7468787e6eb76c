"""Write files completely or not at all, and hash their content."""

import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from expertflow.core.disk import DiskFullError, check_space, find_full
from expertflow.core.errors import ExpertflowError
from expertflow.core.format import size
from expertflow.core.locks import flock
from expertflow.core.progress import show_activity

CHUNK_BYTES = 1 << 20
PARTIAL, LOCK = ".partial", ".lock"
ABANDONED_S = 3600


def canonical_json(value: Any) -> str:
    """Serialize equal values to equal text: sorted keys, no white space, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def sha256_text(text: str) -> str:
    """Hash text as UTF-8, including lone surrogates, which are legal in JSON strings."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_json(value: Any) -> str:
    return sha256_text(canonical_json(value))


def sha256_file(path: Path) -> str:
    digest, n_read = hashlib.sha256(), 0
    with path.open("rb") as stream, show_activity(lambda: f"hashing {path}, {size(n_read)} so far"):
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            n_read += len(chunk)
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
    """Yield a temporary path next to ``path``; rename it to ``path`` only if the block succeeds.

    Works for files and directories. A failure leaves nothing behind.
    """
    is_stream = path.exists() and not path.is_file() and not path.is_dir()
    if is_stream or path.parent == Path("/dev"):
        # Root's rename would put a file in the place of /dev/null or of the link /dev/stdout.
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_partial(path) as (partial, _):
        yield partial
        _share(partial)
        # Content first, then the name: a power cut must not leave the name of an empty file.
        sync(partial)
        # A rename replaces a file, but not a folder that has contents. Moved aside, because a kill
        # during a removal would leave half of it in place.
        if path.is_dir() and not path.is_symlink():
            shutil.move(path, partial.with_name(".old"))
        partial.replace(path)
        sync_directory(path.parent)


def _share(partial: Path) -> None:
    # Libraries make weights private to the owner; other new files have these permissions.
    usual = (partial.parent / LOCK).stat().st_mode & 0o666
    for file in [partial] if partial.is_file() else partial.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(file.stat().st_mode | usual)


@contextmanager
def hold_partial(path: Path) -> Iterator[tuple[Path, IO[str]]]:
    """Yield a path of the same name in a hidden folder next to it, which is removed at the end.

    Also yield the lock of that folder, which a child process may inherit. Folders that dead
    processes left for the same path are removed, too: a folder stays locked while any process with
    its lock lives. DiskFullError if the block's output does not fit.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        if is_abandoned(left):
            remove(left)
    # Not named by process: two machines may have the same ID.
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL))
    try:
        with (folder / f"{LOCK}.new").open("w") as lock:
            with suppress(OSError):  # a file system may have no locks
                flock(lock)
            # Under its final name it is always held.
            (folder / f"{LOCK}.new").rename(folder / LOCK)
            yield folder / path.name, lock
    except Exception as error:
        # Rust libraries have their own exceptions; only the message reveals a full disk.
        number = None if isinstance(error, ExpertflowError) else find_full(error)
        if number is None:
            raise
        files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
        raise DiskFullError(number, path, sum(f.stat().st_size for f in files)) from error
    finally:
        remove(folder)


def is_abandoned(partial: Path) -> bool:
    """Return whether the process that made a partial is dead.

    Without locks, it counts as dead after an hour without a change.
    """
    with suppress(OSError), (partial / LOCK).open("r+") as lock:
        return flock(lock)
    with suppress(OSError):
        newest_s = max(path.lstat().st_mtime for path in (partial, *partial.rglob("*")))
        return time.time() - newest_s > ABANDONED_S
    return False


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json_lines(path: Path, *, tail_bytes: int | None = None) -> list[Any]:
    """Read a log of JSON objects, one per line, or its end; skip truncated lines."""
    values = []
    with path.open("rb") as stream:
        if tail_bytes is not None:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - tail_bytes))
        lines = stream.read().split(b"\n")
    for line in lines:
        # The end may start in the middle of a line, and a killed writer may have stopped in one.
        with suppress(ValueError):
            values.append(json.loads(line))
    return values


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_raise_unless_gone)
    else:
        path.unlink(missing_ok=True)


def _raise_unless_gone(_: object, path: str, info: Any) -> None:
    error: OSError = info[1]
    # A killed run's monitor may still be running here, and clean up.
    if isinstance(error, FileNotFoundError):
        return
    # For a file in an open folder, it is only the last part of the path.
    error.filename = path
    raise error


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it across file systems."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without hard links.
        check_space([(target, source.stat().st_size, target.name)])
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
