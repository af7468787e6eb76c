"""Name documents by hashes: equal ones, and groups that must stay on one side of the split.

Two texts are equal when they differ only in blanks, line ends or the way Unicode composes letters.
The split's hash is salted: a data set may itself have been cut by a plain hash of the very same
key, and then its groups are not spread evenly any more.
"""

import hashlib
import unicodedata

HASH_BYTES = 16
SALT = b"held out: "


def normalised(text: str) -> str:
    r"""Fold what makes no difference to a reader: every run of blanks is one, letters are composed.

    >>> normalised("a\r\n  b ")
    'a b'
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(text.split())


def hash_document(given: str, answer: str) -> tuple[int, bytes]:
    """Give the place of the group that ``given`` makes, and the hash of both texts together."""
    digest = hashlib.sha256(SALT + given.encode("utf-8", "surrogatepass"))
    place = int.from_bytes(digest.digest()[:8], "big")
    digest.update(b"\n" + answer.encode("utf-8", "surrogatepass"))
    return place, digest.digest()[:HASH_BYTES]


def text_hash(text: str) -> bytes:
    """Hash a text as it is, to 16 bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:HASH_BYTES]


def group_hash(group: str) -> int:
    """Give a group its place in [0, 2^64): a document whose place is low enough is held out."""
    digest = hashlib.sha256(SALT + group.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")
