"""Ask git for commits and their changes, and parse its object and diff formats.

Commits are requested in batches, as every request costs two process switches. Answers are read in
pieces: only the start of an absurdly long object, file list or patch is kept.
"""

import contextlib
import io
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypedDict, TypeVar

from msgspec import Struct, field

from expertflow.core.errors import DataError
from expertflow.data.sources.git_options import GitOptions
from expertflow.data.sources.git_store import BIG_FILE_BYTES, ENDED_EARLY, GitPipe

Item = TypeVar("Item")
CHUNK_BYTES = 1 << 16
COMMIT_BYTES = 1 << 20
# A patch longer by more than this is not read to its end; a new process is faster.
PATIENCE_BYTES = 4 << 20
BATCH_IDS = 64
# These fit into any command line.
MAX_EXCLUDED_FILES, MAX_EXCLUDED_BYTES = 100, 50_000
_DIFF_TREE = ("diff-tree", "--stdin", "-r", "-z", "--root", "--diff-merges=first-parent")
_PATCH = (
    *("--numstat", "--patch", "--find-renames", "--unified=3", "--diff-algorithm=myers"),
    *("--submodule=short", "--abbrev=7", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
# Some Python codecs are not text encodings, and some take quadratic time.
_ENCODING = re.compile(
    r"us-?ascii|latin-?1|iso-?8859-?\d{1,2}|(?:cp|windows-?)\d{3,4}|koi8-?[ru]|iso-?2022-?jp"
    r"|euc-?(?:jp|kr)|shift-?jis|sjis|gb(?:k|2312|18030)|big5(?:-?hkscs)?|mac-?roman",
    re.IGNORECASE,
)


class Person(NamedTuple):
    name: str
    e_mail: str

    @property
    def key(self) -> str:
        return (self.e_mail or self.name).lower()


class Commit(NamedTuple):
    """A commit's header and message.

    ``authored_at`` is null if missing or after year 9999; ``is_whole`` if within ``COMMIT_BYTES``.
    """

    author: Person
    committer: Person
    authored_at: datetime | None
    message: str
    is_whole: bool
    replaced: bool


class FileChange(TypedDict):
    """A changed file; the counts of lines are null for a binary one."""

    path: str
    renamed_from: str | None
    n_added: int | None
    n_deleted: int | None


class Changes(NamedTuple):
    """A commit's files, as its record lists them, and its patch, cut at a line end."""

    files: list[FileChange]
    diff: str
    is_truncated: bool
    replaced: bool


class TouchedFiles(Struct):
    """What a commit touches: ``n_any`` files, ``n_files`` with a wanted ending.

    Git loads the objects ``loaded`` in full: files added, deleted or changed in type.
    """

    n_any: int = 0
    n_files: int = 0
    loaded: list[tuple[bytes, bytes]] = field(default_factory=list)


class HistoryReader:
    def __init__(self, git_dir: Path, options: GitOptions) -> None:
        self.options = options
        self._git_dir = git_dir
        self._pathspecs = options.pathspecs
        specs = ("--", *self._pathspecs) if self._pathspecs else ()
        paths = ("--", *options.paths) if options.paths else ()
        raw = ("--raw", "--no-abbrev", "--no-renames")
        self._cat = GitPipe(git_dir, "cat-file", "--batch")
        self._touched = GitPipe(git_dir, *_DIFF_TREE, *raw, *paths)
        self._sizes = GitPipe(git_dir, "cat-file", "--batch-check=%(objectsize)")
        self._patch = GitPipe(git_dir, *_DIFF_TREE, *_PATCH, *specs)
        # diff-tree echoes a line that is not a commit id; this marks the end of an answer.
        self._sentinel = b"end of commit " + secrets.token_hex(16).encode() + b"\n"

    def close(self) -> None:
        for pipe in (self._cat, self._touched, self._sizes, self._patch):
            pipe.close()

    def read_commits(self, commit_ids: Sequence[str]) -> Iterator[Commit]:
        for batch in split_batches(commit_ids):
            stdout = self._cat.send_question(
                "".join(f"{commit_id}\n" for commit_id in batch).encode()
            )
            for commit_id in batch:
                answer = stdout.readline().split()
                if len(answer) != 3:
                    raise DataError(f"commit {commit_id}: cannot be read; run git fsck")
                n_bytes = int(answer[2])
                raw = stdout.read(min(n_bytes, COMMIT_BYTES))
                # The remainder of a long object, and the newline that ends each answer.
                left = n_bytes + 1 - len(raw)
                while left > 0 and (chunk := stdout.read(min(left, CHUNK_BYTES))):
                    left -= len(chunk)
                yield _parse_commit(raw, is_whole=n_bytes <= COMMIT_BYTES)

    def read_touched(self, batch: Sequence[str], skipped: Counter[str]) -> dict[str, TouchedFiles]:
        """Return the touched files of a batch's wanted commits, from ``diff-tree --raw -z``.

        At most ``BATCH_IDS`` commits: git must be able to read all questions before it answers.
        """
        options, shown = self.options, {}
        endings = tuple(ending.encode() for ending in options.endings)
        touched = {commit_id: TouchedFiles() for commit_id in batch}
        question = "".join(f"{commit_id}\n" for commit_id in batch).encode() + self._sentinel
        fields = self._fields(self._touched.send_question(question))
        for part in fields:
            if not part.startswith(b":"):
                # The id of a commit that changes something.
                this = touched[part.decode()]
                continue
            # Such as ":100644 100644 {old id} {new id} M", then the path as the next field.
            old_mode, new_mode, old, new, _ = part[1:].split(b" ")
            path = next(fields)
            this.n_any += 1
            if endings and not path.endswith(endings):
                continue
            this.n_files += 1
            are_files = old_mode.startswith(b"100") and new_mode.startswith(b"100")
            # Added and deleted files have mode 000000 on one side, and the id there is all zeros.
            if not are_files and this.n_files <= options.max_files:
                this.loaded += [(blob, path) for blob in (old, new) if blob.strip(b"0")]
        for commit_id, files in touched.items():
            if options.paths and not files.n_any:
                skipped["paths"] += 1
            elif options.languages and not files.n_files:
                skipped["languages"] += 1
            elif files.n_files > options.max_files:
                skipped["too_many_files"] += 1
            else:
                shown[commit_id] = files
        return shown

    def read_changes(self, commit_id: str, touched: TouchedFiles) -> Changes | None:
        """Read a commit's files and patch; None if git cannot exclude all big files."""
        big = self._big_paths(touched)
        if not big:
            return self._parse_changes(self._patch, commit_id)
        # Git would load big files to show them or find renames: only list them.
        if len(big) > MAX_EXCLUDED_FILES or sum(map(len, big)) > MAX_EXCLUDED_BYTES:
            return None
        excluded = [f":(exclude,literal){os.fsdecode(path)}" for path in big]
        command = (*_DIFF_TREE, *_PATCH, "--", *(self._pathspecs or ["*"]), *excluded)
        with contextlib.closing(GitPipe(self._git_dir, *command)) as patch:
            changes = self._parse_changes(patch, commit_id)
        decode = _Decoder()
        counts = [b"-\t-\t" + path for path in big]
        files = [*changes.files, *_parse_files(counts, decode)]
        files.sort(key=lambda file: str(file["path"]))
        return changes._replace(files=files, replaced=changes.replaced or decode.replaced)

    def _fields(self, stdout: io.BufferedReader) -> Iterator[bytes]:
        rest = b""
        while rest != self._sentinel:
            *complete, rest = (rest + _read_some(stdout)).split(b"\0")
            yield from complete

    def _big_paths(self, touched: TouchedFiles) -> list[bytes]:
        found: dict[bytes, None] = {}
        for batch in split_batches(touched.loaded):
            stdout = self._sizes.send_question(b"".join(blob + b"\n" for blob, _ in batch))
            for _, path in batch:
                # For a submodule the answer is "... missing".
                answer = stdout.readline().strip()
                if answer.isdigit() and int(answer) > BIG_FILE_BYTES:
                    found[path] = None
        return list(found)

    def _parse_changes(self, diff: GitPipe, commit_id: str) -> Changes:
        """Read one answer: id NUL, counts each ended by NUL, one more NUL, then the patch."""
        sentinel, max_bytes = self._sentinel, self.options.max_diff_bytes
        stdout = diff.send_question(commit_id.encode() + b"\n" + sentinel)
        answer, counts_end = bytearray(), -1
        while not answer.endswith(sentinel):
            # The two bytes may be split between two chunks.
            n_searched = max(0, len(answer) - 1)
            answer += _read_some(stdout)
            if counts_end < 0:
                counts_end = answer.find(b"\0\0", n_searched)
            elif len(answer) > counts_end + 2 + max_bytes + PATIENCE_BYTES:
                diff.close()
                break
        else:
            del answer[-len(sentinel) :]
        if counts_end < 0:
            return Changes([], "", False, False)
        patch, decode = bytes(answer[counts_end + 2 :]), _Decoder()
        files = _parse_files(bytes(answer[:counts_end]).split(b"\0")[1:], decode)
        is_cut = len(patch) > max_bytes
        text = decode(patch[: patch.rfind(b"\n", 0, max_bytes) + 1] if is_cut else patch)
        return Changes(files, text, is_cut, decode.replaced)


def split_batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), BATCH_IDS):
        yield items[start : start + BATCH_IDS]


def _read_some(stdout: io.BufferedReader) -> bytes:
    chunk = stdout.read1(CHUNK_BYTES)
    if not chunk:
        raise DataError(ENDED_EARLY)
    return chunk


class _Decoder:
    """Decode with a commit's encoding, else as UTF-8; record whether bytes were replaced."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.replaced = False
        self._names = (encoding, "utf-8") if _ENCODING.fullmatch(encoding) else ("utf-8",)

    def __call__(self, raw: bytes) -> str:
        for name in self._names:
            with contextlib.suppress(LookupError, UnicodeDecodeError):
                return raw.decode(name)
        self.replaced = True
        return raw.decode("utf-8", "replace")


def _parse_commit(raw: bytes, *, is_whole: bool) -> Commit:
    header, _, body = raw.partition(b"\n\n")
    first: dict[bytes, bytes] = {}
    for line in header.split(b"\n"):
        key, _, value = line.partition(b" ")
        first.setdefault(key, value)
    decode = _Decoder(first.get(b"encoding", b"utf-8").decode("ascii", "replace"))
    author, at = _parse_person(first.get(b"author", b""), decode)
    committer, _ = _parse_person(first.get(b"committer", b""), decode)
    return Commit(author, committer, at, decode(body), is_whole, decode.replaced)


def _parse_person(line: bytes, decode: _Decoder) -> tuple[Person, datetime | None]:
    """Parse ``name <e-mail> seconds zone``; any part may be missing."""
    who, bracket, when = line.rpartition(b">")
    if not bracket:
        who, when = line, b""
    name, _, e_mail = who.partition(b"<")
    at = None
    with contextlib.suppress(ValueError, OverflowError, OSError):
        seconds, _ = when.split()
        at = datetime.fromtimestamp(int(seconds), UTC)
    return Person(decode(name.strip()), decode(e_mail.strip())), at


def _parse_files(counts: list[bytes], decode: _Decoder) -> list[FileChange]:
    """Parse ``added TAB deleted TAB path``; a rename has two more fields, old and new."""
    files: list[FileChange] = []
    parts = iter(counts)
    for part in parts:
        n_added, n_deleted, path = part.split(b"\t", 2)
        old: str | None = None
        if not path:
            old, path = decode(next(parts)), next(parts)
        # Git writes "-" for binary files.
        added, deleted = (None if n == b"-" else int(n) for n in (n_added, n_deleted))
        change = FileChange(path=decode(path), renamed_from=old, n_added=added, n_deleted=deleted)
        files.append(change)
    return files
