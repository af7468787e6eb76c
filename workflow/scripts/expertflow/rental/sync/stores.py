"""The stores: a local folder, another machine by rsync, and S3 object storage."""

import base64
import hashlib
import math
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.core.files import remove, replacing, sha256_file
from expertflow.core.process import CommandStopped, run_until
from expertflow.rental.sync.store import (
    S3,
    SECRETS,
    NotThere,
    Store,
    SyncFailed,
    check_key,
    convert_errors,
    files_below,
    is_local,
)

# rsync's exit code for, among other errors, a missing file or folder.
PARTIAL = 23
# Before rsync has answered on the other side.
UNANSWERED = "closed (0 bytes received"
ABSENT = ("No such file or directory", "Not a directory")
PATIENCE_S = 60
# How --itemize-changes marks a transferred file.
MOVED = ("<f", ">f", "cf")
# rsync is silent while a side hashes a file; even slow disks read this fast.
SLOW_BYTES_PER_S = 20e6
SMALL_BYTES = 1 << 20
SHOWN_CHARACTERS = 300
# Up to this size one request, above it parts: 10,000 parts are allowed, so 640 GB fit.
PART_BYTES = 64 << 20
SUM = "SHA256"


def open_store(destination: str, cancel: threading.Event) -> Store:
    """Open a destination; raise ConfigError if a program or package for it is missing."""
    if destination.startswith(S3):
        return S3Store(destination, cancel)
    if not is_local(destination):
        return RsyncStore(destination, cancel)
    return LocalStore(destination, cancel)


class LocalStore(Store):
    """A mounted folder: a network volume, a second disk."""

    def _transfer_file(self, path: Path, key: str) -> tuple[int, str]:
        target, way = Path(self.shown, key), "read back, sha256 matches"
        with convert_errors(f"{target}: not copied"):
            # By content: sizes and times may be equal by chance or by design.
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

    def _sha256(self, path: Path) -> str:
        with path.open("rb") as stream:
            # Read the disk: the page cache would return what was written.
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.sha256()
        for chunk in self._chunks(path):
            digest.update(chunk)
        return digest.hexdigest()

    def fetch(self, key: str, folder: Path) -> None:
        source = Path(self.shown, key)
        with convert_errors(f"{source}: not copied"):
            if not source.exists():
                raise NotThere(f"{source}: does not exist")
            place = source.parent if source.is_file() else source
            for name in [source.name] if source.is_file() else files_below(source):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with (folder / name).open("wb") as writer:
                    writer.writelines(self._chunks(place / name))
                shutil.copystat(place / name, folder / name)

    def list_names(self, key: str) -> list[str]:
        place = Path(self.shown, key)
        with convert_errors(f"{place}: cannot be listed"):
            return sorted(path.name for path in place.iterdir()) if place.is_dir() else []

    def delete(self, key: str) -> None:
        place = Path(self.shown, key)
        with convert_errors(f"{place}: not removed"):
            remove(place)


class RsyncStore(Store):
    """A remote folder, over passwordless ssh (host:path) or from a daemon (rsync://…)."""

    def __init__(self, destination: str, cancel: threading.Event) -> None:
        super().__init__(SECRETS.sub("", destination), cancel)
        if shutil.which("rsync") is None:
            raise ConfigError(
                f"{self.shown}: rsync is not installed here; install it"
                " (apt-get install rsync), or use a path or s3://…"
            )
        self._root = destination.rstrip("/")
        # Set once the second pass finds different content with the same size and time.
        self._doubts = False

    def _transfer_files(self, folder: Path, key: str, names: list[str]) -> tuple[int, str]:
        verified = "rsync --checksum: nothing differs"
        if not names:
            return 0, verified
        sizes = {n: (folder / n).stat().st_size for n in names if (folder / n).is_file()}
        largest = max(sizes.values(), default=0)
        patience_s = PATIENCE_S + math.ceil(largest / SLOW_BYTES_PER_S)
        # rsync treats a line that begins with # or ; as a comment.
        text = "\0".join(f"./{name}" for name in names)

        def run(*options: str) -> list[str]:
            listed = ["--times", "--copy-links", "--mkpath", "--files-from=-", "--from0"]
            listed += ["--no-implied-dirs", "--itemize-changes"]
            places = [f"{folder}/", f"{self._root}/{key}/"]
            out = self._run(*options, *listed, *places, text=text, patience_s=patience_s)
            return [_unescape(line.split(" ", 1)[1]) for line in out if line[:2] in MOVED]

        # A small file may have been replaced by one of the same size within the same second.
        moved = run("--checksum") if self._doubts or largest <= SMALL_BYTES else run()
        # Both sides hash what they have on disk now.
        different = run("--checksum", "--dry-run")
        self._doubts = bool(different)
        if different:
            raise SyncFailed(
                f"{self.shown}: {len(different)} of {len(names)} files of {key} differ from those"
                f" here, for example {different[0]}"
            )
        return sum(sizes.get(name, 0) for name in moved), verified

    def fetch(self, key: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # rsync copies the contents of a folder if its name ends with a slash.
        is_file = key.endswith(".json")
        source = f"{self._root}/{key}" + ("" if is_file else "/")
        # Local files are always copied again; comparing first would make the other side hash all of
        # them.
        self._run("--recursive", "--times", "--ignore-times", source, f"{folder}/")

    def list_names(self, key: str) -> list[str]:
        try:
            lines = self._run("--list-only", "--no-human-readable", f"{self._root}/{key}/", "")
        except NotThere:
            return []
        # -rw-r--r--   4096 2026/01/31 08:00:00 name of a file
        rows = (line.split(None, 4) for line in lines)
        return sorted(_unescape(row[4]) for row in rows if len(row) == 5 and row[4] != ".")

    def delete(self, key: str) -> None:
        """Remove a file or a folder, by syncing an empty folder with --delete."""
        parent, _, name = key.rpartition("/")
        rules = [f"--include=/{name}", f"--include=/{name}/**", "--exclude=*"]
        with tempfile.TemporaryDirectory() as empty:
            self._run("--recursive", "--delete", *rules, f"{empty}/", f"{self._root}/{parent}/")

    def _run(self, *arguments: str, text: str = "", patience_s: int = PATIENCE_S) -> list[str]:
        self._check_wanted()
        *options, source, target = arguments
        command = ["rsync", f"--timeout={patience_s}", *options, "--", source]
        # A listing has no target.
        command += [target] if target else []
        try:
            # In its own session, Ctrl-C reaches it only through the guard, and ssh cannot prompt.
            done = run_until(command, self._cancel.is_set, given=text, signals=[signal.SIGTERM])
        except CommandStopped:
            raise SyncFailed(f"{self.shown}: the copy was canceled") from None
        if code := done.returncode:
            message = " ".join(done.stderr.split()).replace(self._root, self.shown)
            is_absent = code == PARTIAL and any(words in message for words in ABSENT)
            kind = NotThere if is_absent else SyncFailed
            fix = ""
            if UNANSWERED in message and not self._root.startswith("rsync:"):
                message = message.partition(" rsync: connection")[0]
                host = self.shown.partition(":")[0]
                fix = f"; 'ssh {host} rsync --version' must work without a password"
            # The error comes last, after the banners of ssh and the other side.
            message = message[-SHOWN_CHARACTERS:]
            raise kind(f"{self.shown}: rsync ended with exit code {code}: {message}{fix}")
        return done.stdout.splitlines()


class S3Store(Store):
    """A prefix of a bucket; credentials and endpoint are boto3's own settings."""

    def __init__(self, destination: str, cancel: threading.Event) -> None:
        super().__init__(destination, cancel)
        try:
            import boto3
            from boto3.exceptions import Boto3Error
            from botocore.exceptions import BotoCoreError, ClientError
            from urllib3.exceptions import HTTPError
        except ImportError as error:
            raise ConfigError(
                f"{destination}: boto3 is not installed; run make s3, or use a path or host:path"
            ) from error
        self._bucket, _, prefix = destination.removeprefix(S3).partition("/")
        self._prefix = prefix.strip("/")
        self._chunk_bytes = PART_BYTES
        self._errors = (Boto3Error, BotoCoreError, ClientError, HTTPError)
        try:
            session = boto3.Session()
            self._client: Any = session.client("s3")
            if session.get_credentials() is None:
                raise ValueError("no credentials, such as AWS_ACCESS_KEY_ID, were found")
        except (*self._errors, ValueError) as error:
            raise ConfigError(f"{destination}: {error}; see boto3's settings") from error

    def _transfer_file(self, path: Path, key: str) -> tuple[int, str]:
        from boto3.s3.transfer import TransferConfig

        target = self._key(key)
        with self._errors_as_ours(target):
            # S3's checksum of a multipart upload is the hash of its parts' hashes.
            parts = [hashlib.sha256(chunk).digest() for chunk in self._chunks(path)]
            if (way := self._compare(path, target, parts)) is not None:
                return 0, way
            n_bytes = path.stat().st_size
            # The same parts that are compared; threads would load several at once.
            config = TransferConfig(
                multipart_threshold=self._chunk_bytes + 1,
                multipart_chunksize=self._chunk_bytes,
                use_threads=False,
            )
            self._asked(
                self._client.upload_file,
                target,
                Filename=str(path),
                ExtraArgs={"ChecksumAlgorithm": SUM},
                Config=config,
                Callback=self._check_wanted,
            )
            if (way := self._compare(path, target, parts)) is None:
                raise SyncFailed(f"s3://{self._bucket}/{target}: is not what was uploaded")
        return n_bytes, way

    def _compare(self, path: Path, target: str, parts: list[bytes]) -> str | None:
        try:
            head = self._asked(self._client.head_object, target, ChecksumMode="ENABLED")
        except NotThere:
            return None
        if head["ContentLength"] != path.stat().st_size:
            return None
        if found := head.get(f"Checksum{SUM}"):
            whole = parts[0] if len(parts) == 1 else hashlib.sha256(b"".join(parts)).digest()
            wanted = base64.b64encode(whole).decode()
            # Storage services differ in whether they append the number of parts.
            is_same = found in (wanted, f"{wanted}-{len(parts)}")
            return "the storage's SHA256 matches" if is_same else None
        body = self._asked(self._client.get_object, target)["Body"]
        digest = hashlib.sha256()
        while chunk := body.read(self._chunk_bytes):
            self._check_wanted()
            digest.update(chunk)
        return "read back, sha256 matches" if digest.hexdigest() == sha256_file(path) else None

    def fetch(self, key: str, folder: Path) -> None:
        place = self._key(key)
        objects = self._objects(place)
        for name in objects:
            relative = check_key(name.removeprefix(place).lstrip("/") or Path(name).name)
            self._check_wanted()
            target = folder / relative
            with self._errors_as_ours(name):
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as stream:
                    fetch, going = self._client.download_fileobj, self._check_wanted
                    self._asked(fetch, name, Fileobj=stream, Callback=going)
        if not objects:
            raise NotThere(f"{self.shown}/{key}: does not exist")

    def list_names(self, key: str) -> list[str]:
        place = self._key(key) + "/"
        return sorted({name.removeprefix(place).split("/")[0] for name in self._objects(place)})

    def delete(self, key: str) -> None:
        for name in self._objects(self._key(key)):
            self._asked(self._client.delete_object, name)

    def _objects(self, place: str) -> list[str]:
        with self._errors_as_ours(place):
            listed = self._client.get_paginator("list_objects_v2")
            pages = list(listed.paginate(Bucket=self._bucket, Prefix=place))
        found = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        below = place if place.endswith("/") else place + "/"
        # Other programs mark folders by objects whose names end with a slash.
        found = [name for name in found if not name.endswith("/")]
        return [name for name in found if name == place or name.startswith(below)]

    def _key(self, key: str) -> str:
        # Keys are UTF-8, but file names need not be: a byte that is not is written as \\xff.
        key = os.fsencode(key).decode("utf-8", "backslashreplace")
        return f"{self._prefix}/{key}" if self._prefix else key

    def _asked(self, method: Callable[..., Any], key: str, **arguments: Any) -> Any:
        with self._errors_as_ours(key):
            return method(Bucket=self._bucket, Key=key, **arguments)

    @contextmanager
    def _errors_as_ours(self, key: str) -> Iterator[None]:
        try:
            yield
        except (*self._errors, OSError) as error:
            # A broken connection yields an error without a response.
            response = getattr(error, "response", None) or {}
            code = response.get("Error", {}).get("Code", "")
            kind = NotThere if code in ("404", "NoSuchKey", "NotFound") else SyncFailed
            raise kind(f"s3://{self._bucket}/{key}: {error}") from error


def _unescape(name: str) -> str:
    r"""Decode a name; rsync shows a byte that is not a character here as \#303."""
    escaped = re.sub(rb"\\#(\d{3})", lambda found: bytes([int(found[1], 8)]), os.fsencode(name))
    return os.fsdecode(escaped)
