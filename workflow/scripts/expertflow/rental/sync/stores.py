"""Stores of files: a folder here, a folder of another machine by rsync; and the door to all."""

import hashlib
import math
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.core.files import remove, replacing
from expertflow.core.process import Stopped, run_until
from expertflow.rental.sync.s3 import S3Store
from expertflow.rental.sync.store import (
    S3,
    NotThere,
    Store,
    SyncFailed,
    is_local,
    without_secrets,
)

# rsync's exit code where, among others, a file or folder it was asked for is not there.
PARTIAL = 23
PATIENCE_S = 60
# Nothing is said while a side hashes a file: slow disks read this much.
SLOW_BYTES_PER_S = 20e6
SMALL_BYTES = 1 << 20
SHOWN_CHARACTERS = 300


def open_store(destination: str, cancel: threading.Event) -> Store:
    """Open a destination: a local path, host:path, rsync://host/module or s3://bucket/prefix.

    Raises:
        ConfigError: what it needs is not installed.
    """
    if destination.startswith(S3):
        return S3Store(destination, cancel)
    if not is_local(destination):
        return RsyncStore(destination, cancel)
    return LocalStore(destination, cancel)


class LocalStore(Store):
    """A folder of this file system: a network volume, a second disk."""

    def _send_file(self, path: Path, key: str) -> tuple[int, str]:
        target, way = Path(self.shown, key), "read back, sha256 equal"
        try:
            if target.is_file() and self._sha256(target) == self._sha256(path):
                return 0, way
            digest = hashlib.sha256()
            with replacing(target) as partial:
                with partial.open("wb") as writer:
                    for chunk in self._chunks(path):
                        digest.update(chunk)
                        writer.write(chunk)
                    writer.flush()
                    os.fsync(writer.fileno())
                if self._sha256(partial) != digest.hexdigest():
                    raise SyncFailed(f"{target}: what was read back is not what was written")
                shutil.copystat(path, partial)
            return target.stat().st_size, way
        except OSError as error:
            raise SyncFailed(f"{target}: not copied: {error}") from error

    def _sha256(self, path: Path) -> str:
        """Hash what the disk has, rather than what memory still holds of it."""
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.sha256()
        for chunk in self._chunks(path):
            digest.update(chunk)
        return digest.hexdigest()

    def fetch(self, key: str, folder: Path) -> None:
        source = Path(self.shown, key)
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
        with Path(target).open("wb") as writer:
            for chunk in self._chunks(Path(source)):
                writer.write(chunk)
        shutil.copystat(source, target)

    def names(self, key: str) -> list[str]:
        place = Path(self.shown, key)
        try:
            return sorted(path.name for path in place.iterdir()) if place.is_dir() else []
        except OSError as error:
            raise SyncFailed(f"{place}: cannot be listed: {error}") from error

    def drop(self, key: str) -> None:
        place = Path(self.shown, key)
        try:
            remove(place)
        except OSError as error:
            raise SyncFailed(f"{place}: not removed: {error}") from error


class RsyncStore(Store):
    """A folder of another machine, over ssh (host:path) or by its daemon (rsync://…).

    ssh has to work without a password: a question nobody answers counts as a failure.
    """

    def __init__(self, destination: str, cancel: threading.Event) -> None:
        super().__init__(without_secrets(destination), cancel)
        if shutil.which("rsync") is None:
            raise ConfigError(
                f"{self.shown}: rsync is not installed here; install it"
                " (apt-get install rsync), or give a path or s3://…"
            )
        self._root = destination.rstrip("/")
        # Same size and time with other content is found by the second pass; then this is on.
        self._doubts = False

    def _send_files(self, folder: Path, key: str, names: list[str]) -> tuple[int, str]:
        """Copy files; then let both sides hash them again."""
        verified = "rsync --checksum: nothing differs"
        if not names:
            return 0, verified
        paths = [path for path in (folder / name for name in names) if path.is_file()]
        largest = max((path.stat().st_size for path in paths), default=0)
        patience_s = PATIENCE_S + math.ceil(largest / SLOW_BYTES_PER_S)

        def run(*options: str) -> list[str]:
            """Return the names of files whose content was, or would be, moved."""
            listed = ["--times", "--copy-links", "--mkpath", "--files-from=-", "--from0"]
            listed += ["--no-implied-dirs", "--itemize-changes"]
            places = [f"{folder}/", f"{self._root}/{key}/"]
            out = self._run(
                *options, *listed, *places, text="\0".join(names), patience_s=patience_s
            )
            return [line.split(" ", 1)[1] for line in out if line[:2] in ("<f", ">f", "cf")]

        # A small file may be another one of the same size in the same second.
        moved = run("--checksum") if self._doubts or largest <= SMALL_BYTES else run()
        # Not counted once more below: what a file has by then is what it had.
        n_bytes = sum((folder / n).stat().st_size for n in moved if (folder / n).is_file())
        different = run("--checksum", "--dry-run")
        self._doubts = bool(different)
        if different:
            raise SyncFailed(
                f"{self.shown}: {len(different)} of {len(names)} files of {key} are not there as"
                f" they are here, {different[0]} for one"
            )
        return n_bytes, verified

    def fetch(self, key: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        is_file = key.endswith(".json")
        source = f"{self._root}/{key}" + ("" if is_file else "/")
        # Whatever is here is copied again; to compare first, the other side would hash all of it.
        self._run("--recursive", "--times", "--ignore-times", source, f"{folder}/")

    def names(self, key: str) -> list[str]:
        try:
            lines = self._run("--list-only", "--no-human-readable", f"{self._root}/{key}/", "")
        except NotThere:
            return []
        rows = (line.split(None, 4) for line in lines)
        return sorted(row[4] for row in rows if len(row) == 5 and row[4] != ".")

    def drop(self, key: str) -> None:
        """Remove a file or a folder, by what rsync deletes where nothing is to be."""
        parent, _, name = key.rpartition("/")
        rules = [f"--include=/{name}", f"--include=/{name}/**", "--exclude=*"]
        with tempfile.TemporaryDirectory() as empty:
            self._run("--recursive", "--delete", *rules, f"{empty}/", f"{self._root}/{parent}/")

    def _run(self, *arguments: str, text: str = "", patience_s: int = PATIENCE_S) -> list[str]:
        """Run rsync to its end, or until it is not wanted any more; return its lines."""
        self._check_wanted()
        *options, source, target = arguments
        command = ["rsync", f"--timeout={patience_s}", *options, "--", source]
        # A listing has no target.
        command += [target] if target else []
        try:
            # In its own session a Ctrl-C reaches it by way of the guard, and ssh asks no terminal.
            done = run_until(command, self._cancel.is_set, given=text, signals=[signal.SIGTERM])
        except Stopped:
            raise SyncFailed(f"{self.shown}: the copy was broken off") from None
        if code := done.returncode:
            message = " ".join(done.stderr.split()).replace(self._root, self.shown)
            is_absent = code == PARTIAL and "No such file or directory" in message
            kind = NotThere if is_absent else SyncFailed
            # What went wrong comes last, after what ssh and the other side greet with.
            message = message[-SHOWN_CHARACTERS:]
            raise kind(f"{self.shown}: rsync ended with exit code {code}: {message}")
        return done.stdout.splitlines()
