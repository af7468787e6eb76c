"""Read the commits of a git repository or bundle as records, without checking anything out.

One walk lists the commits; two long-lived processes (``cat-file --batch``, ``diff-tree --stdin``)
then answer commit by commit, so memory holds one commit at a time and no process is started per
commit. No hook, external diff, text conversion or replacement object of the repository is used.
"""

import codecs
import contextlib
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, Literal

from expertflow.core.errors import DataError

CHUNK_BYTES = 1 << 16
_IDENTITY = re.compile(rb"^(.*?) ?<([^>]*)> (-?\d+) [+-]\d+$")
_TRAILER = re.compile(r"^([A-Za-z-]+-by): *([^<\n]*?) *<([^>\n]*)>", re.MULTILINE)
_E_MAIL = re.compile(r"<?[\w.+-]+@[\w-]+(?:\.[\w-]+)+>?")
# Settings that would let the repository, or another owner's files, change what is run or read.
_SAFE = (
    *("-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
    *("-c", "protocol.allow=never", "-c", "protocol.file.allow=always"),
    *("-c", "core.attributesFile=/dev/null", "-c", "diff.renameLimit=1000"),
)
_DIFF = (
    *("diff-tree", "--stdin", "-r", "-z", "--root", "--diff-merges=first-parent"),
    *("--numstat", "--patch", "--unified=3", "--diff-algorithm=myers", "--find-renames"),
    *("--abbrev=7", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GitOptions:
    """Which commits to take, and how much of them.

    ``since`` and ``until`` are ISO 8601 and compared with the author's date (UTC unless they say
    otherwise); a day stands for the whole day. ``authors`` are parts of "Name <e-mail>", in any
    case. ``paths`` are git pathspecs: other files are left out, and commits without any as well.
    """

    ref: str = "HEAD"
    paths: Sequence[str] = ()
    since: str | None = None
    until: str | None = None
    authors: Sequence[str] = ()
    merges: Literal["skip", "keep"] = "skip"
    max_diff_bytes: int = 8000
    pseudonymise: bool = True

    @classmethod
    def from_manifest(cls, options: dict[str, Any]) -> "GitOptions":
        """Check the ``options`` of a manifest's git source."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            raise DataError(f"options.{unknown[0]}: unknown; a git source knows {', '.join(known)}")
        result = cls(**{key: value for key, value in options.items() if value is not None})
        if result.merges not in ("skip", "keep"):
            raise DataError(f"options.merges: {result.merges!r} is neither 'skip' nor 'keep'")
        for key in ("paths", "authors"):
            if isinstance(getattr(result, key), str):
                raise DataError(f"options.{key}: {getattr(result, key)!r} must be a list of texts")
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Commit:
    parents: tuple[str, ...]
    name: str
    e_mail: str
    authored_at: datetime | None
    message: str
    replaced: bool


def head(repository: Path, *, ref: str = "HEAD") -> str:
    """Return the id of the commit that pins all content: that of ``ref``.

    A bundle's id is read from its header, without unpacking it.
    """
    if ref.startswith("-"):
        raise DataError(f"options.ref: {ref!r} is no name of a branch, tag or commit")
    if not repository.is_file():
        commit = ["rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"]
        return run_git(_git_dir(repository), *commit, failure=_no_ref(repository, ref)).strip()
    listed = run_git(
        None, "bundle", "list-heads", str(repository), failure=f"{repository}: not a git bundle"
    )
    heads: dict[str, str] = {}
    for line in listed.splitlines():
        commit_id, _, name = line.partition(" ")
        heads[name] = commit_id
    for name in (ref, f"refs/heads/{ref}", f"refs/tags/{ref}"):
        if name in heads:
            return heads[name]
    raise DataError(_no_ref(repository, ref))


def count_commits(repository: Path, *, options: dict[str, Any]) -> int:
    """Count the records that ``extract_commits`` yields under the same options."""
    return sum(1 for _ in extract_commits(repository, options={**options, "max_diff_bytes": 0}))


def extract_commits(repository: Path, *, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one record per commit, parents before children.

    With ``pseudonymise`` (the default) authors are "Contributor N" by first appearance in the whole
    history of ``ref``, also in trailers such as Co-authored-by, and e-mail addresses are removed
    from messages; diffs are left as they are. ``bytes_replaced`` says that a text was not valid
    UTF-8 and has replacement characters. A diff is cut at the end of a line.

    Raises:
        DataError: no git, no repository or bundle, an unknown ref, or no commit is selected.
    """
    chosen = GitOptions.from_manifest(options)
    tip = head(repository, ref=chosen.ref)
    with _opened(repository) as git_dir:
        n_records = 0
        for record in _records(git_dir, tip=tip, options=chosen):
            n_records += 1
            yield record
    if not n_records:
        raise DataError(f"{repository}: no commit of {chosen.ref} is selected; widen the options")


def _records(git_dir: Path, *, tip: str, options: GitOptions) -> Iterator[dict[str, Any]]:
    walk = run_git(git_dir, "rev-list", "--reverse", "--topo-order", tip, failure="rev-list failed")
    refs = _refs(git_dir)
    sentinel = b"end of commit " + secrets.token_hex(16).encode() + b"\n"
    contributors: dict[str, str] = {}
    paths = ("--", *options.paths) if options.paths else ()
    with _pipe(git_dir, "cat-file", "--batch") as cat, _pipe(git_dir, *_DIFF, *paths) as diff:
        for commit_id in walk.split():
            commit = _read_commit(cat, commit_id)
            author = _pseudonym(contributors, name=commit.name, e_mail=commit.e_mail)
            if not _selected(commit, options):
                continue
            # diff-tree echoes a line that is no commit id; that marks where an answer ends.
            _ask(diff, commit_id.encode() + b"\n" + sentinel)
            changes = _read_changes(diff, sentinel=sentinel, max_bytes=options.max_diff_bytes)
            if options.paths and not changes["files"]:
                continue
            message = commit.message
            if options.pseudonymise:
                message = _without_identities(message, contributors)
            yield {
                "commit": commit_id,
                "parents": list(commit.parents),
                "author": author if options.pseudonymise else commit.name,
                "authored_at": _utc_text(commit.authored_at),
                "subject": message.lstrip("\n").partition("\n")[0],
                "message": message,
                **changes,
                "bytes_replaced": commit.replaced or changes["bytes_replaced"],
                "is_merge": len(commit.parents) > 1,
                "refs": refs.get(commit_id, []),
            }


def _selected(commit: _Commit, options: GitOptions) -> bool:
    if options.merges == "skip" and len(commit.parents) > 1:
        return False
    who = f"{commit.name} <{commit.e_mail}>".lower()
    if options.authors and not any(author.lower() in who for author in options.authors):
        return False
    when = commit.authored_at
    if when is None:
        return options.since is None and options.until is None
    if options.since is not None and when < _moment(options.since, key="since"):
        return False
    if options.until is None:
        return True
    until = _moment(options.until, key="until")
    return when < until + timedelta(days=1) if _is_day(options.until) else when <= until


def _is_day(text: str) -> bool:
    return len(str(text)) == len("2025-01-31")


def _moment(text: str, *, key: str) -> datetime:
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError as error:
        raise DataError(f"options.{key}: {text!r} is no date like 2025-01-31") from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _utc_text(moment: datetime | None) -> str | None:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment else None


def _pseudonym(contributors: dict[str, str], *, name: str, e_mail: str) -> str:
    key = (e_mail or name).lower()
    return contributors.setdefault(key, f"Contributor {len(contributors) + 1}")


def _without_identities(message: str, contributors: dict[str, str]) -> str:
    def renamed(match: re.Match[str]) -> str:
        who = _pseudonym(contributors, name=match[2], e_mail=match[3])
        return f"{match[1]}: {who}"

    return _E_MAIL.sub("<e-mail>", _TRAILER.sub(renamed, message))


def _read_commit(cat: "_Process", commit_id: str) -> _Commit:
    _ask(cat, commit_id.encode() + b"\n")
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
    return _Commit(
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


def _read_changes(diff: "_Process", *, sentinel: bytes, max_bytes: int) -> dict[str, Any]:
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


def _refs(git_dir: Path) -> dict[str, list[str]]:
    """Name the branches and tags that point at each commit; an annotated tag is followed."""
    listed = run_git(
        git_dir,
        *("for-each-ref", "--format=%(objectname) %(*objectname) %(refname:lstrip=2)"),
        *("refs/heads", "refs/tags"),
        failure="the branches cannot be listed",
    )
    names: dict[str, list[str]] = {}
    for line in listed.splitlines():
        plain, peeled, name = line.split(" ", 2)
        names.setdefault(peeled or plain, []).append(name)
    return names


def _no_ref(repository: Path, ref: str) -> str:
    return f"{repository}: {ref} is no commit there; set options.ref to a branch, tag or commit"


def _git_dir(repository: Path) -> Path:
    failure = f"{repository}: not a git repository; give its directory or a .bundle file"
    if not repository.is_dir():
        raise DataError(failure)
    command = ("-C", str(repository), "rev-parse", "--absolute-git-dir")
    return Path(run_git(None, *command, failure=failure, ceiling=repository).rstrip("\n"))


@contextlib.contextmanager
def _opened(repository: Path) -> Iterator[Path]:
    """Give the git directory of a repository; a bundle is unpacked for as long as it is read."""
    if repository.is_dir():
        yield _git_dir(repository)
        return
    with tempfile.TemporaryDirectory(prefix="bundle-") as directory:
        target = Path(directory) / "repository.git"
        options = ("--quiet", "--bare", "--no-hardlinks", "--template=")
        command = ("clone", *options, "-c", "core.hooksPath=/dev/null")
        failure = f"{repository}: the bundle cannot be unpacked; it must be whole, not incremental"
        run_git(None, *command, str(repository.absolute()), str(target), failure=failure)
        yield target


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    stdin: IO[bytes]
    stdout: IO[bytes]


def _ask(process: _Process, question: bytes) -> None:
    process.stdin.write(question)
    process.stdin.flush()


@contextlib.contextmanager
def _pipe(git_dir: Path, *arguments: str) -> Iterator[_Process]:
    process = subprocess.Popen(
        _command(git_dir, *arguments),
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        yield _Process(stdin=process.stdin, stdout=process.stdout)
    finally:
        process.kill()
        process.communicate()


def run_git(
    git_dir: Path | None,
    *arguments: str,
    failure: str,
    stdin: bytes = b"",
    ceiling: Path | None = None,
) -> str:
    """Run one git command apart from all user settings and hooks; return what it prints.

    Raises:
        DataError: ``failure`` and git's last line, or git is missing.
    """
    try:
        done = subprocess.run(
            _command(git_dir, *arguments),
            env=_environment(ceiling),
            input=stdin,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise DataError("git: the program is missing; install git") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise DataError(f"{failure} ({said})" if said else failure)
    return done.stdout.decode("utf-8", "surrogateescape")


def _command(git_dir: Path | None, *arguments: str) -> list[str]:
    # As a bare repository: attributes and submodules of a working tree must not change a diff.
    place = (f"--git-dir={git_dir}", "-c", "core.bare=true") if git_dir else ()
    return ["git", *_SAFE, *place, *arguments]


def _environment(ceiling: Path | None = None) -> dict[str, str]:
    """Hide the user's and the machine's git settings; ``ceiling`` stops the search for .git."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    if ceiling is not None:
        kept["GIT_CEILING_DIRECTORIES"] = str(ceiling.absolute().parent)
    return kept | {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
