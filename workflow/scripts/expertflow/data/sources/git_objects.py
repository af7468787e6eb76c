"""Ask git for commits and their changes, and read its object and diff formats.

Commits are asked for in batches, as every question costs two changes of process. Every answer is
read in pieces: of an object, a list of files or a patch that is absurdly long only the start is
ever held.
"""

import codecs
import contextlib
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from expertflow.core.errors import DataError
from expertflow.data.sources.git_options import GitOptions
from expertflow.data.sources.git_process import BIG_FILE_BYTES, Pipe
from expertflow.data.sources.git_store import Store

CHUNK_BYTES = 1 << 16
COMMIT_BYTES = 1 << 20
# A patch is read to its end only when this much more comes: a new process is sooner ready.
PATIENCE_BYTES = 4 << 20
BATCH_IDS = 64
# What a command line holds for certain.
MAX_EXCLUDED_FILES, MAX_EXCLUDED_BYTES = 100, 50_000
_DIFF_TREE = ("diff-tree", "--stdin", "-r", "-z", "--root", "--diff-merges=first-parent")
_PATCH = (
    *(
        "--numstat",
        "--patch",
        "--find-renames",
        "--unified=3",
        "--diff-algorithm=myers",
        "--submodule=short",
    ),
    *("--abbrev=7", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
# Python knows codecs that are no encoding of a language, and some that take quadratic time.
_ENCODING = re.compile(
    r"us-?ascii|latin-?1|iso-?8859-?\d{1,2}|(?:cp|windows-?)\d{3,4}|koi8-?[ru]|iso-?2022-?jp"
    r"|euc-?(?:jp|kr)|shift-?jis|sjis|gb(?:k|2312|18030)|big5(?:-?hkscs)?|mac-?roman",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Person:
    """A name and an e-mail address as a commit has them; both may be empty."""

    name: str
    e_mail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A commit's header and message.

    ``authored_at`` is null where the date is missing or beyond the year 9999; ``is_whole`` says
    that the commit is no longer than ``COMMIT_BYTES``, ``replaced`` that bytes were no valid text.
    """

    author: Person
    committer: Person
    authored_at: datetime | None
    message: str
    is_whole: bool
    replaced: bool


@dataclass(slots=True)
class Touched:
    """What a commit touches: ``n_any`` files, ``n_files`` of them with a wanted ending.

    ``loaded`` are the objects, with their paths, that git would load whole to show them, whatever
    their size: files added, deleted or changed in kind.
    """

    n_any: int = 0
    n_files: int = 0
    loaded: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileChange:
    """One file of a commit; numbers of lines are null for a binary file."""

    path: str
    renamed_from: str | None
    n_added: int | None
    n_deleted: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Files and patch of a commit; the patch is cut at the end of a line."""

    files: tuple[FileChange, ...]
    diff: str
    is_truncated: bool
    replaced: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipes:
    """The commands that answer: commits, files touched, sizes, patches."""

    cat: Pipe
    touched: Pipe
    sizes: Pipe
    patch: Pipe
    sentinel: bytes


@contextlib.contextmanager
def open_pipes(store: Store, options: GitOptions) -> Iterator[Pipes]:
    """Start the commands for as long as the block lasts."""
    specs = ("--", *options.pathspecs()) if options.pathspecs() else ()
    paths = ("--", *options.paths) if options.paths else ()
    commands = {
        "cat": ("cat-file", "--batch"),
        "touched": (*_DIFF_TREE, "--raw", "--no-abbrev", "--no-renames", *paths),
        "sizes": ("cat-file", "--batch-check=%(objectsize)"),
        "patch": (*_DIFF_TREE, *_PATCH, *specs),
    }
    with contextlib.ExitStack() as stack:
        pipes = {
            name: stack.enter_context(contextlib.closing(store.pipe(*command)))
            for name, command in commands.items()
        }
        sentinel = b"end of commit " + secrets.token_hex(16).encode() + b"\n"
        yield Pipes(**pipes, sentinel=sentinel)


def read_commits(cat: Pipe, commit_ids: Sequence[str]) -> Iterator[Commit]:
    """Ask ``cat-file --batch`` for commits, in their order."""
    for start in range(0, len(commit_ids), BATCH_IDS):
        batch = commit_ids[start : start + BATCH_IDS]
        stdout = cat.ask("".join(f"{commit_id}\n" for commit_id in batch).encode())
        for commit_id in batch:
            answer = stdout.readline().split()
            if len(answer) != 3:
                raise DataError(f"commit {commit_id}: cannot be read; run git fsck")
            n_bytes = int(answer[2])
            raw = stdout.read(min(n_bytes, COMMIT_BYTES))
            left = n_bytes + 1 - len(raw)
            while left > 0 and (chunk := stdout.read(min(left, CHUNK_BYTES))):
                left -= len(chunk)
            yield _commit(raw, is_whole=n_bytes <= COMMIT_BYTES)


def _commit(raw: bytes, *, is_whole: bool) -> Commit:
    header, _, body = raw.partition(b"\n\n")
    lines = (line.partition(b" ") for line in header.split(b"\n"))
    first: dict[bytes, bytes] = {}
    for key, _, value in lines:
        first.setdefault(key, value)
    encoding = first.get(b"encoding", b"utf-8").decode("ascii", "replace")
    author, at, author_replaced = _person(first.get(b"author", b""), encoding)
    committer, _, committer_replaced = _person(first.get(b"committer", b""), encoding)
    message, message_replaced = _decode(body, encoding)
    return Commit(
        author=author,
        committer=committer,
        authored_at=at,
        message=message,
        is_whole=is_whole,
        replaced=author_replaced or committer_replaced or message_replaced,
    )


def _person(line: bytes, encoding: str) -> tuple[Person, datetime | None, bool]:
    """Split ``name <e-mail> seconds zone``, where any part may be missing."""
    who, bracket, when = line.rpartition(b">")
    if not bracket:
        who, when = line, b""
    name, _, e_mail = who.partition(b"<")
    texts = [_decode(part.strip(), encoding) for part in (name, e_mail)]
    person = Person(texts[0][0], texts[1][0])
    return person, _from_seconds(when), texts[0][1] or texts[1][1]


def _from_seconds(when: bytes) -> datetime | None:
    try:
        seconds, _ = when.split()
        return datetime.fromtimestamp(int(seconds), UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _decode(raw: bytes, encoding: str = "utf-8") -> tuple[str, bool]:
    """Decode as the commit says, else as UTF-8; the flag says that bytes had to be replaced."""
    names = (encoding, "utf-8") if _ENCODING.fullmatch(encoding) else ("utf-8",)
    for name in names:
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            return raw.decode(name), False
    return raw.decode("utf-8", "replace"), True


def touched_by(
    pipes: Pipes, batch: list[str], options: GitOptions, skipped: Counter[str]
) -> dict[str, Touched]:
    """Look which files the commits of a batch touch, and keep those that are to be shown."""
    touched = _read_touched(
        pipes.touched,
        batch,
        sentinel=pipes.sentinel,
        endings=tuple(ending.encode() for ending in options.endings()),
        max_files=options.max_files,
    )
    shown = {}
    for commit_id, files in zip(batch, touched, strict=True):
        if options.paths and not files.n_any:
            skipped["paths"] += 1
        elif options.languages and not files.n_files:
            skipped["languages"] += 1
        elif files.n_files > options.max_files:
            skipped["too_many_files"] += 1
        else:
            shown[commit_id] = files
    return shown


def changes_of(
    store: Store, pipes: Pipes, commit_id: str, touched: Touched, options: GitOptions
) -> Changes | None:
    """Read the files and the patch of one commit.

    Null where more files are too big than git can be told to leave out.
    """
    big = _big_paths(pipes.sizes, touched)
    if not big:
        return _read_changes(pipes.patch, commit_id, pipes.sentinel, options.max_diff_bytes)
    # Git would load them, to show them or to look for renames: they are named, and not asked for.
    if len(big) > MAX_EXCLUDED_FILES or sum(map(len, big)) > MAX_EXCLUDED_BYTES:
        return None
    excluded = [f":(exclude,literal){os.fsdecode(path)}" for path in big]
    command = (*_DIFF_TREE, *_PATCH, "--", *(options.pathspecs() or ["*"]), *excluded)
    with contextlib.closing(store.pipe(*command)) as patch:
        changes = _read_changes(patch, commit_id, pipes.sentinel, options.max_diff_bytes)
        return _with_big_files(changes, big)


def _read_touched(
    diff: Pipe,
    commit_ids: Sequence[str],
    *,
    sentinel: bytes,
    endings: tuple[bytes, ...],
    max_files: int,
) -> list[Touched]:
    """Ask ``diff-tree --raw -z`` what commits touch; at most ``max_files`` are remembered of each.

    At most ``BATCH_IDS`` commits: git must be able to read all questions before it answers.
    """
    touched = [Touched() for _ in commit_ids]
    fields = _fields(diff, commit_ids, sentinel)
    for index, part in fields:
        if not part.startswith(b":"):
            continue  # the commit's id, which git repeats
        old_mode, new_mode, old, new, _ = part[1:].split(b" ")
        _, path = next(fields)
        this = touched[index]
        this.n_any += 1
        if endings and not path.endswith(endings):
            continue
        this.n_files += 1
        if this.n_files > max_files or (_is_file(old_mode) and _is_file(new_mode)):
            continue
        this.loaded += [(blob, path) for blob in (old, new) if blob.strip(b"0")]
    return touched


def _is_file(mode: bytes) -> bool:
    return mode.startswith(b"100")


def _fields(diff: Pipe, commit_ids: Sequence[str], sentinel: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of all answers, each with the number of its commit."""
    # diff-tree echoes a line that is no commit id; that marks where an answer ends.
    question = b"".join(commit_id.encode() + b"\n" + sentinel for commit_id in commit_ids)
    stdout = diff.ask(question)
    index, rest = 0, b""
    while index < len(commit_ids):
        chunk = stdout.read1(CHUNK_BYTES)
        if not chunk:
            raise diff.failed()
        *whole, rest = (rest + chunk).split(b"\0")
        for part in whole:
            while part.startswith(sentinel):
                index, part = index + 1, part.removeprefix(sentinel)
            yield index, part
        while rest.startswith(sentinel):
            index, rest = index + 1, rest.removeprefix(sentinel)


def _big_paths(check: Pipe, touched: Touched) -> list[bytes]:
    """Ask ``cat-file --batch-check=%(objectsize)`` which files are too big to be loaded."""
    found: dict[bytes, None] = {}
    for start in range(0, len(touched.loaded), BATCH_IDS):
        batch = touched.loaded[start : start + BATCH_IDS]
        stdout = check.ask(b"".join(blob + b"\n" for blob, _ in batch))
        for _, path in batch:
            # Of a submodule the answer is "... missing".
            answer = stdout.readline().strip()
            if answer.isdigit() and int(answer) > BIG_FILE_BYTES:
                found[path] = None
    return list(found)


def _read_changes(diff: Pipe, commit_id: str, sentinel: bytes, max_bytes: int) -> Changes:
    """Read one answer: id NUL, counts each ended by NUL, one more NUL, then the patch.

    At most ``max_bytes`` of the patch are kept.
    """
    stdout = diff.ask(commit_id.encode() + b"\n" + sentinel)
    answer, tail = bytearray(), b""
    n_bytes, patch_at = 0, -1
    while tail != sentinel:
        chunk = stdout.read1(CHUNK_BYTES)
        if not chunk:
            raise diff.failed()
        n_bytes += len(chunk)
        tail = (tail + chunk)[-len(sentinel) :]
        if patch_at < 0 or len(answer) <= patch_at + max_bytes:
            answer += chunk
        if patch_at < 0:
            patch_at = answer.find(b"\0\0", max(0, len(answer) - len(chunk) - 1)) + 2 or -1
            patch_at = -1 if patch_at == 1 else patch_at
        elif n_bytes > patch_at + max_bytes + PATIENCE_BYTES:
            diff.close()
            break
    if tail == sentinel:
        n_bytes -= len(sentinel)
        del answer[n_bytes:]
    counts = bytes(answer[: patch_at - 2]) if patch_at >= 0 else b""
    patch = bytes(answer[patch_at:]) if patch_at >= 0 else b""
    files, names_replaced = _files(counts.split(b"\0")[1:])
    text, replaced = _cut(patch, max_bytes)
    return Changes(
        files=files,
        diff=text,
        is_truncated=len(patch) > max_bytes,
        replaced=replaced or names_replaced,
    )


def _files(counts: list[bytes]) -> tuple[tuple[FileChange, ...], bool]:
    """Turn ``added TAB deleted TAB path`` into files; a rename has two more fields, old and new."""
    files, any_replaced = [], False
    parts = iter(counts)
    for part in parts:
        n_added, n_deleted, path = part.split(b"\t", 2)
        old: str | None = None
        if not path:
            old, replaced = _decode(next(parts))
            any_replaced |= replaced
            path = next(parts)
        text, replaced = _decode(path)
        any_replaced |= replaced
        # Git counts no lines in binary files and writes "-".
        numbers = [None if number == b"-" else int(number) for number in (n_added, n_deleted)]
        files.append(
            FileChange(path=text, renamed_from=old, n_added=numbers[0], n_deleted=numbers[1])
        )
    return tuple(files), any_replaced


def _with_big_files(changes: Changes, paths: Sequence[bytes]) -> Changes:
    """Name files among the changes that git was not asked to show."""
    named = [_decode(path) for path in paths]
    big = [
        FileChange(path=path, renamed_from=None, n_added=None, n_deleted=None) for path, _ in named
    ]
    return replace(
        changes,
        files=tuple(sorted((*changes.files, *big), key=lambda file: file.path)),
        replaced=changes.replaced or any(replaced for _, replaced in named),
    )


def _cut(patch: bytes, max_bytes: int) -> tuple[str, bool]:
    if len(patch) <= max_bytes:
        return _decode(patch)
    kept = patch[:max_bytes]
    kept = kept[: kept.rfind(b"\n") + 1] or kept
    # A line longer than the limit may be cut inside a character, which is then left out.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(kept)
    return text, "\ufffd" in text and _decode(kept)[1]
