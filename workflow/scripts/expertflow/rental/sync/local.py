"""Copy folders to another place of this file system: a network volume, a second disk."""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from expertflow.core.files import CHUNK_BYTES, remove
from expertflow.rental.sync.store import NotThere, Sent, SyncFailed

VERIFIED = "read back, sha256 equal"


class LocalStore:
    """A folder as a store."""

    def __init__(self, root: Path, cancel: threading.Event) -> None:
        self._root, self._cancel = root, cancel
        self.shown = str(root)

    def send(self, folder: Path, key: str, names: Iterable[str]) -> Sent:
        """Copy files that are not there with the same content; read all of them back."""
        n_files = n_bytes = 0
        for name in names:
            try:
                n_bytes += self._send(folder / name, self._root / key / name)
            except OSError as error:
                raise SyncFailed(f"{self._root / key / name}: not copied: {error}") from error
            n_files += 1
        return Sent(n_files=n_files, n_bytes=n_bytes, verified=VERIFIED)

    def _send(self, source: Path, target: Path) -> int:
        """Copy a file unless it is there; give the number of bytes that were written."""
        if target.is_file() and self._sha256(target) == self._sha256(source):
            return 0
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        digest = hashlib.sha256()
        try:
            with source.open("rb") as reader, partial.open("wb") as writer:
                while chunk := reader.read(CHUNK_BYTES):
                    self._go_on()
                    digest.update(chunk)
                    writer.write(chunk)
                writer.flush()
                os.fsync(writer.fileno())
            if self._sha256(partial) != digest.hexdigest():
                raise SyncFailed(f"{target}: what was read back is not what was written")
            shutil.copystat(source, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target.stat().st_size

    def _sha256(self, path: Path) -> str:
        """Hash what the disk has, rather than what memory still holds of it."""
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := stream.read(CHUNK_BYTES):
                self._go_on()
                digest.update(chunk)
        return digest.hexdigest()

    def _go_on(self) -> None:
        if self._cancel.is_set():
            raise SyncFailed(f"{self._root}: the copy was broken off")

    def fetch(self, key: str, folder: Path) -> None:
        """Copy a file, or all files below a key, into a folder."""
        source = self._root / key
        try:
            if source.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                self._copy(str(source), str(folder / source.name))
            elif source.is_dir():
                shutil.copytree(source, folder, copy_function=self._copy, dirs_exist_ok=True)
            else:
                raise NotThere(f"{source}: nothing is there")
        except OSError as error:
            raise SyncFailed(f"{source}: not copied: {error}") from error

    def _copy(self, source: str, target: str) -> None:
        with Path(source).open("rb") as reader, Path(target).open("wb") as writer:
            while chunk := reader.read(CHUNK_BYTES):
                self._go_on()
                writer.write(chunk)
        shutil.copystat(source, target)

    def names(self, key: str) -> list[str]:
        """List what lies directly below a key."""
        place = self._root / key
        try:
            return sorted(path.name for path in place.iterdir()) if place.is_dir() else []
        except OSError as error:
            raise SyncFailed(f"{place}: cannot be listed: {error}") from error

    def drop(self, key: str) -> None:
        """Remove a file or a folder."""
        try:
            remove(self._root / key)
        except OSError as error:
            raise SyncFailed(f"{self._root / key}: not removed: {error}") from error
