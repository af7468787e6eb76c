"""Open the place that an address names."""

import threading
from pathlib import Path

from expertflow.rental.sync.destination import S3, is_local
from expertflow.rental.sync.local import LocalStore
from expertflow.rental.sync.rsync import RsyncStore
from expertflow.rental.sync.s3 import S3Store
from expertflow.rental.sync.store import Store


def open_store(destination: str, cancel: threading.Event) -> Store:
    """Open a destination: a local path, host:path, rsync://host/module or s3://bucket/prefix.

    Raises:
        ConfigError: what it needs is not installed.
    """
    if destination.startswith(S3):
        return S3Store(destination, cancel)
    if not is_local(destination):
        return RsyncStore(destination, cancel)
    return LocalStore(Path(destination), cancel)
