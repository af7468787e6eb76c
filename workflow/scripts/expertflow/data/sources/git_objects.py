"""Read commits and their changes from git's own object and diff formats."""

import codecs
import contextlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from expertflow.core.errors import DataError
from expertflow.data.sources.git_process import Process, ask

CHUNK_BYTES = 1 << 16
_IDENTITY = re.compile(rb"^(.*?) ?<([^>]*)> (-?\d+) [+-]\d+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A commit's header and message; ``replaced`` says that bytes were no valid text."""

    parents: tuple[str, ...]
    name: str
    e_mail: str
    authored_at: datetime | None
    message: str
    replaced: bool


def read_commit(cat: Process, commit_id: str) -> Commit:
    """Ask ``cat-file --batch`` for one commit."""
    ask(cat, commit_id.encode() + b"\n")
    answer = cat.stdout.readline().split()
    if len(answer) != 3:
        raise DataError(f"commit {commit_id}: cannot be read; run git fsck on the repository")
    raw = cat.stdout.read(int(answer[2]) + 1)[:-1]
    header, _, body = raw.partition(b"\n\n")
    lines = [line.split(b" ", 1) for line in header.split(b"\n") if b" " in line]
    first = dict(reversed(lines))
    encoding = first.get(b"encoding", b"utf-8").decode("ascii", "replace")
    found = _IDENTITY.match(first.get(b"author", b""))
    name, e_mail, seconds = found.groups() if found else (b"", b"", b"")
    texts = [_decode(part, encoding) for part in (name, e_mail, body)]
    return Commit(
        parents=tuple(value.decode() for key, value in lines if key == b"parent"),
        name=texts[0][0],
        e_mail=texts[1][0],
        authored_at=_from_seconds(seconds),
        message=texts[2][0],
        replaced=any(replaced for _, replaced in texts),
    )


def _from_seconds(seconds: bytes) -> datetime | None:
    # Damaged commits exist whose date is missing or beyond the year 9999.
    try:
        return datetime.fromtimestamp(int(seconds), UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _decode(raw: bytes, encoding: str = "utf-8") -> tuple[str, bool]:
    """Decode as the commit says, else as UTF-8; the flag says that bytes had to be replaced."""
    for name in (encoding, "utf-8"):
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            return raw.decode(name), False
    return raw.decode("utf-8", "replace"), True


def read_changes(diff: Process, *, sentinel: bytes, max_bytes: int) -> dict[str, Any]:
    """Read one answer: id NUL, counts each ended by NUL, one more NUL, then the patch.

    At most ``max_bytes`` of the patch are kept (and a byte more, which shows that it is longer).
    """
    answer = bytearray()
    patch_at = -1
    while not answer.endswith(sentinel):
        chunk = diff.stdout.readline(CHUNK_BYTES)
        if not chunk:
            raise DataError("git diff-tree ended early; run git fsck on the repository")
        answer += chunk
        if patch_at < 0:
            patch_at = answer.find(b"\0\0") + 2 if b"\0\0" in answer else -1
        elif not answer.endswith(sentinel):
            keep = patch_at + max_bytes + 1
            # The line that is read last stays whole, so that the sentinel is seen.
            del answer[keep : max(keep, len(answer) - len(chunk))]
    del answer[-len(sentinel) :]
    counts = bytes(answer[: patch_at - 2]) if patch_at >= 0 else b""
    patch = bytes(answer[patch_at:]) if patch_at >= 0 else b""
    files, names_replaced = _files(counts.split(b"\0")[1:])
    text, replaced = _cut(patch, max_bytes)
    return {
        "files": files,
        "n_files": len(files),
        "n_added": sum(file["n_added"] or 0 for file in files),
        "n_deleted": sum(file["n_deleted"] or 0 for file in files),
        "diff": text,
        "diff_truncated": len(patch) > max_bytes,
        "bytes_replaced": replaced or names_replaced,
    }


def _files(counts: list[bytes]) -> tuple[list[dict[str, Any]], bool]:
    """Turn ``added TAB deleted TAB path`` into files; a rename has two more fields, old and new."""
    files, any_replaced = [], False
    fields = iter(counts)
    for field in fields:
        n_added, n_deleted, path = field.split(b"\t", 2)
        if not path:
            next(fields)
            path = next(fields)
        text, replaced = _decode(path)
        any_replaced |= replaced
        # Git counts no lines in binary files and writes "-".
        numbers = [None if number == b"-" else int(number) for number in (n_added, n_deleted)]
        files.append({"path": text, "n_added": numbers[0], "n_deleted": numbers[1]})
    return files, any_replaced


def _cut(patch: bytes, max_bytes: int) -> tuple[str, bool]:
    if len(patch) <= max_bytes:
        return _decode(patch)
    kept = patch[:max_bytes]
    kept = kept[: kept.rfind(b"\n") + 1] or kept
    # A line longer than the limit may be cut inside a character, which is then left out.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(kept)
    return text, "\ufffd" in text and _decode(kept)[1]
