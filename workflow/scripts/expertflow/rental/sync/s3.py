"""Copy folders to object storage that speaks S3."""

import base64
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.core.files import sha256_file
from expertflow.rental.sync.store import (
    S3,
    NotThere,
    Store,
    SyncFailed,
    check_destination,
    check_key,
)

# One request up to this size, and parts of it above: 10,000 parts are allowed, so 640 GB fit.
PART_BYTES = 64 << 20
SUM = "SHA256"


class S3Store(Store):
    """A prefix of a bucket as a store; credentials and endpoint are boto3's own settings."""

    def __init__(
        self, destination: str, cancel: threading.Event, *, part_bytes: int = PART_BYTES
    ) -> None:
        super().__init__(destination, cancel)
        try:
            import boto3
            from boto3.exceptions import Boto3Error
            from botocore.exceptions import BotoCoreError, ClientError
            from urllib3.exceptions import HTTPError
        except ImportError as error:
            raise ConfigError(
                f"{destination}: boto3 is not installed; run make s3, or give a path or host:path"
            ) from error
        check_destination(destination)
        self._bucket, _, prefix = destination.removeprefix(S3).partition("/")
        self._prefix = prefix.strip("/")
        self._chunk_bytes = part_bytes
        self._errors = (Boto3Error, BotoCoreError, ClientError, HTTPError)
        try:
            self._client: Any = boto3.client("s3")
        except self._errors as error:
            raise ConfigError(f"{destination}: {error}; see boto3's settings") from error

    def _send_file(self, path: Path, key: str) -> tuple[int, str]:
        """Upload a file unless its checksum is there; then ask for the checksum."""
        target = self._key(key)
        with self._errors_as_ours(target):
            parts = [hashlib.sha256(chunk).digest() for chunk in self._chunks(path)]
            if (way := self._compare(path, target, parts)) is not None:
                return 0, way
            n_bytes = path.stat().st_size
            self._upload(path, target, parts)
            if (way := self._compare(path, target, parts)) is None:
                raise SyncFailed(f"s3://{self._bucket}/{target}: not what was uploaded")
        return n_bytes, way

    def _upload(self, path: Path, target: str, parts: list[bytes]) -> None:
        ask, client = self._asked, self._client
        if len(parts) <= 1:
            sums = {"ChecksumAlgorithm": SUM, "ChecksumSHA256": _text(_whole(parts))}
            ask(client.put_object, target, Body=path.read_bytes(), **sums)
            return
        upload = ask(client.create_multipart_upload, target, ChecksumAlgorithm=SUM)["UploadId"]
        try:
            done = []
            for number, chunk in enumerate(self._chunks(path), 1):
                one = {"PartNumber": number, "ChecksumSHA256": _text(parts[number - 1])}
                part = ask(client.upload_part, target, UploadId=upload, **one, Body=chunk)
                done.append({**one, "ETag": part["ETag"]})
            whole = {"MultipartUpload": {"Parts": done}}
            ask(client.complete_multipart_upload, target, UploadId=upload, **whole)
        except (SyncFailed, OSError):
            # Parts that lie about are paid for.
            ask(client.abort_multipart_upload, target, UploadId=upload)
            raise

    def _compare(self, path: Path, target: str, parts: list[bytes]) -> str | None:
        """Return how an object was found to be the file; null where it is not."""
        try:
            head = self._asked(self._client.head_object, target, ChecksumMode="ENABLED")
        except NotThere:
            return None
        if head["ContentLength"] != path.stat().st_size:
            return None
        wanted = {_text(_whole(parts)), f"{_text(_whole(parts))}-{len(parts)}"}
        if found := head.get(f"Checksum{SUM}"):
            return "SHA256 of the storage equal" if found in wanted else None
        body = self._asked(self._client.get_object, target)["Body"]
        digest = hashlib.sha256()
        while chunk := body.read(self._chunk_bytes):
            self._check_wanted()
            digest.update(chunk)
        return "read back, sha256 equal" if digest.hexdigest() == sha256_file(path) else None

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
            raise NotThere(f"{self.shown}/{key}: nothing is there")

    def names(self, key: str) -> list[str]:
        place = self._key(key) + "/"
        return sorted({name.removeprefix(place).split("/")[0] for name in self._objects(place)})

    def drop(self, key: str) -> None:
        for name in self._objects(self._key(key)):
            self._asked(self._client.delete_object, name)

    def _objects(self, place: str) -> list[str]:
        """List the object of this key and all below it."""
        with self._errors_as_ours(place):
            listed = self._client.get_paginator("list_objects_v2")
            pages = list(listed.paginate(Bucket=self._bucket, Prefix=place))
        found = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        below = place if place.endswith("/") else place + "/"
        return [name for name in found if name == place or name.startswith(below)]

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _asked(self, method: Callable[..., Any], key: str, **arguments: Any) -> Any:
        with self._errors_as_ours(key):
            return method(Bucket=self._bucket, Key=key, **arguments)

    @contextmanager
    def _errors_as_ours(self, key: str) -> Iterator[None]:
        try:
            yield
        except (*self._errors, OSError) as error:
            # Of a line that broke there is an error with no response.
            response = getattr(error, "response", None) or {}
            code = response.get("Error", {}).get("Code", "")
            kind = NotThere if code in ("404", "NoSuchKey", "NotFound") else SyncFailed
            raise kind(f"s3://{self._bucket}/{key}: {error}") from error


def _whole(parts: list[bytes]) -> bytes:
    """Return the checksum of an object: of its content, or of the sums of its parts."""
    if len(parts) == 1:
        return parts[0]
    return hashlib.sha256(b"".join(parts)).digest()


def _text(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
