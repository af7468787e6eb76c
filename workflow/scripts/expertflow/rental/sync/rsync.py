"""Copy folders to another machine by rsync: over ssh (host:path) or to its daemon (rsync://…)."""

import math
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.core.process import Stopped, run_until
from expertflow.rental.sync.destination import without_secrets
from expertflow.rental.sync.store import NotThere, Sent, SyncFailed

VERIFIED = "rsync --checksum: nothing differs"
# rsync's exit code where, among others, a file or folder it was asked for is not there.
PARTIAL = 23
PATIENCE_S = 60
# Nothing is said while a side hashes a file: slow disks read this much.
SLOW_BYTES_PER_S = 20e6
SMALL_BYTES = 1 << 20
SHOWN_CHARACTERS = 300


class RsyncStore:
    """A folder of another machine as a store.

    ssh has to work without a password: a question nobody answers counts as a failure.
    """

    def __init__(self, destination: str, cancel: threading.Event) -> None:
        if shutil.which("rsync") is None:
            raise ConfigError(
                f"{without_secrets(destination)}: rsync is not installed here; install it"
                " (apt-get install rsync), or give a path or s3://…"
            )
        self._root, self._cancel = destination.rstrip("/"), cancel
        self.shown = without_secrets(destination)
        # Same size and time with other content is found by the second pass; then this is on.
        self._doubts = False

    def send(self, folder: Path, key: str, names: Iterable[str]) -> Sent:
        """Copy files; then let both sides hash them again."""
        wanted = list(names)
        if not wanted:
            return Sent(n_files=0, n_bytes=0, verified=VERIFIED)
        to = [f"{folder}/", f"{self._root}/{key}/"]
        files = "\0".join(wanted)
        listed = ["--times", "--copy-links", "--mkpath", "--files-from=-", "--from0"]
        listed += ["--no-implied-dirs"]
        listed += ["--itemize-changes"]
        largest = _largest_bytes(folder / name for name in wanted)
        patience_s = _patience_s(largest)
        # A small file may be another one of the same size in the same second.
        first = ["--checksum"] if self._doubts or largest <= SMALL_BYTES else []
        out = self._run(*first, *listed, *to, text=files, patience_s=patience_s)
        moved = [folder / line.split(" ", 1)[1] for line in out if _is_moved(line)]
        # Not counted once more below: what a file has by then is what it had.
        n_bytes = sum(path.stat().st_size for path in moved if path.is_file())
        compared = ["--checksum", "--dry-run", *listed]
        out = self._run(*compared, *to, text=files, patience_s=patience_s)
        different = [line.split(" ", 1)[1] for line in out if _is_moved(line)]
        self._doubts = bool(different)
        if different:
            raise SyncFailed(
                f"{self.shown}: {len(different)} of {len(wanted)} files of {key} are not there as"
                f" they are here, {different[0]} for one"
            )
        return Sent(n_files=len(wanted), n_bytes=n_bytes, verified=VERIFIED)

    def fetch(self, key: str, folder: Path) -> None:
        """Copy a file, or all files below a key, into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        is_file = key.endswith(".json")
        source = f"{self._root}/{key}" + ("" if is_file else "/")
        # Whatever is here is copied again; to compare first, the other side would hash all of it.
        self._run("--recursive", "--times", "--ignore-times", source, f"{folder}/")

    def names(self, key: str) -> list[str]:
        """List what lies directly below a key."""
        try:
            lines = self._run("--list-only", "--no-human-readable", f"{self._root}/{key}/", "")
        except NotThere:
            return []
        names = [line.split(None, 4)[4] for line in lines if len(line.split(None, 4)) == 5]
        return sorted(name for name in names if name != ".")

    def drop(self, key: str) -> None:
        """Remove a file or a folder, by what rsync deletes where nothing is to be."""
        parent, _, name = key.rpartition("/")
        rules = [f"--include=/{name}", f"--include=/{name}/**", "--exclude=*"]
        with tempfile.TemporaryDirectory() as empty:
            self._run("--recursive", "--delete", *rules, f"{empty}/", f"{self._root}/{parent}/")

    def _run(self, *arguments: str, text: str = "", patience_s: int = PATIENCE_S) -> list[str]:
        """Run rsync to its end, or until it is not wanted any more; give its lines."""
        if self._cancel.is_set():
            raise SyncFailed(f"{self.shown}: the copy was broken off")
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


def _largest_bytes(paths: Iterable[Path]) -> int:
    return max((path.stat().st_size for path in paths if path.is_file()), default=0)


def _patience_s(largest_bytes: int) -> int:
    """Give how long a side may be silent while it hashes the largest file."""
    return PATIENCE_S + math.ceil(largest_bytes / SLOW_BYTES_PER_S)


def _is_moved(line: str) -> bool:
    """Tell from a line of --itemize-changes whether a file's content was, or would be, moved."""
    return line[:2] in ("<f", ">f", "cf")
