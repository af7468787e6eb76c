"""Addresses that copies go to: a folder here, another machine, object storage."""

import re

from expertflow.core.errors import ConfigError

S3 = "s3://"
REMOTE = re.compile(r"^(rsync://|[^/]+:)")
# user:password@ of an address, and what follows a question mark.
_SECRETS = re.compile(r"(?<=://)[^/@]+@|\?.*$")


def is_local(destination: str) -> bool:
    """Tell whether a destination is a folder here.

    >>> is_local("/volume/run1"), is_local("s3://bucket/run1"), is_local("host:run1")
    (True, False, False)
    """
    return not destination.startswith(S3) and REMOTE.match(destination) is None


def without_secrets(destination: str) -> str:
    """Give an address without password and query.

    >>> without_secrets("rsync://me:secret@host/module")
    'rsync://host/module'
    """
    return _SECRETS.sub("", destination)


def check_destination(destination: str) -> str:
    """Refuse an address that cannot be one.

    Raises:
        ConfigError: it is empty, or names no bucket.
    """
    bucket = destination.removeprefix(S3).split("/")[0]
    if not destination or (destination.startswith(S3) and not bucket):
        raise ConfigError(
            f"destination {destination!r}: give a path, host:path, rsync://… or s3://bucket/prefix"
        )
    return destination
