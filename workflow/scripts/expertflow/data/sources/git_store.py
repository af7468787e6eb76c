"""Open a repository or bundle isolated from user, machine and repository settings.

A repository can carry settings, attributes, grafts, hooks and remotes that change what git shows or
start programs. So its objects are read through an empty temporary git directory without any; only
branch and tag names are read from the repository itself, by commands that open only commits.
"""

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

from expertflow.core.errors import DataError

# Larger files count as binary: git neither loads them nor compares lines.
BIG_FILE_BYTES = 1 << 20
# Settings that would otherwise let untrusted files change what is run or read.
_SAFE = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
    *("-c", "core.attributesFile=/dev/null", "-c", "core.commitGraph=false"),
    *("-c", "core.multiPackIndex=false", "-c", f"core.bigFileThreshold={BIG_FILE_BYTES}"),
    *("-c", "diff.renameLimit=400", "-c", "protocol.allow=never"),
    # Otherwise git's last line is a hint about GIT_GRAFT_FILE, not the reason.
    *("-c", "advice.graftFileDeprecated=false"),
)
ENDED_EARLY = "git ended early: an object is missing (a partial clone?) or damaged; run git fsck"
# Names are read in milliseconds; a setting that includes a pipe would block git indefinitely.
TIMEOUT_S = 120.0
_ID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


class GitPipe:
    """A git command that answers questions until it is closed; it starts with the first one."""

    def __init__(self, git_dir: Path, *arguments: str) -> None:
        self._command = _command(git_dir, *arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def send_question(self, question: bytes) -> io.BufferedReader:
        """Send a question; return a stream of answers. DataError if an object is missing."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(question)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise DataError(ENDED_EARLY) from error
        return cast(io.BufferedReader, self._process.stdout)

    def close(self) -> None:
        if self._process is None:
            return
        # Its unread answers are useless, and it would block on a full pipe.
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._process = None


def run_git(
    git_dir: Path | None,
    *arguments: str,
    failure: str,
    stdin: bytes = b"",
    timeout_s: float | None = None,
) -> str:
    """Run one git command without user settings and hooks; return its output.

    Non-UTF-8 bytes become lone surrogates. DataError states ``failure`` and git's last line.
    """
    try:
        done = subprocess.run(
            _command(git_dir, *arguments),
            env=_environment(),
            input=stdin,
            capture_output=True,
            check=False,
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise DataError("git: the program is missing; install git") from error
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{failure} (git gave no answer in {timeout_s:.0f} s)") from error
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        reason = "".join(sign if sign.isprintable() else "?" for sign in reason)
        raise DataError(f"{failure} ({reason})" if reason else failure)
    return done.stdout.decode("utf-8", "surrogateescape")


def _command(git_dir: Path | None, *arguments: str) -> list[str]:
    # Bare: attributes and submodules of a working tree must not change a diff.
    place = (f"--git-dir={git_dir}", "-c", "core.bare=true") if git_dir else ()
    return ["git", *_SAFE, *place, *arguments]


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return kept | {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_GRAFT_FILE": os.devnull,
        "GIT_NO_LAZY_FETCH": "1",
        # For git without GIT_NO_LAZY_FETCH: with no protocol allowed, a fetch fails before it
        # starts a program that the repository names.
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }


class IsolatedStore(NamedTuple):
    """A repository's objects, and commits by full ref name.

    ``shallow`` commits lack their parents (shallow clone); ``walked`` is the short name of ``ref``.
    """

    git_dir: Path
    tip: str
    walked: str | None
    refs: dict[str, str]
    shallow: frozenset[str] = frozenset()


def resolve_commit(repository: Path, *, ref: str = "HEAD") -> str:
    """Return the commit id of ``ref``, which pins all content."""
    missing = f"{repository}: {ref} is not a commit; set options.ref to a branch, tag or commit"
    if ref.startswith("-"):
        raise DataError(f"options.ref: {ref!r} is not a branch, tag or commit")
    if not repository.is_file():
        command = ("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        place = _git_directory(repository)
        return run_git(place, *command, failure=missing, timeout_s=TIMEOUT_S).strip()
    heads = list_refs(repository)
    found = _full_name(heads, ref)
    if found is None:
        raise DataError(f"{repository}: has no {ref}; set options.ref to one of {', '.join(heads)}")
    return heads[found]


def list_refs(repository: Path, *, tip: str | None = None) -> dict[str, str]:
    """Return the object ids of branches and tags by full name, of a bundle also of its HEAD.

    With a ``tip``, a repository's are those within its history.
    """
    if repository.is_file():
        place, failure = None, f"{repository}: not a git bundle"
        command = ["bundle", "list-heads", str(repository.absolute())]
    else:
        place = _git_directory(repository)
        failure = f"{place}: its branches cannot be read"
        command = ["for-each-ref", "--format=%(objectname) %(refname)", "refs/heads", "refs/tags"]
        command += [f"--merged={tip}"] if tip else []
    listed = run_git(place, *command, failure=failure, timeout_s=TIMEOUT_S)
    lines = (line.partition(" ") for line in listed.split("\n") if line)
    return {name: object_id for object_id, _, name in lines}


@contextlib.contextmanager
def open_store(repository: Path, *, ref: str) -> Iterator[IsolatedStore]:
    tip = resolve_commit(repository, ref=ref)
    with tempfile.TemporaryDirectory(prefix="git-") as directory:
        git_dir = Path(directory)
        (git_dir / "refs").mkdir()
        (git_dir / "HEAD").write_text("ref: refs/heads/none\n", "ascii")
        # With the wrong one git rejects the longer ids of a SHA-256 repository.
        object_format = "sha1" if len(tip) == 40 else "sha256"
        settings = "[core]\n\trepositoryformatversion = 1\n\tbare = true\n"
        settings += f"[extensions]\n\tobjectFormat = {object_format}\n"
        (git_dir / "config").write_text(settings, "ascii")
        shallow = frozenset[str]()
        if repository.is_file():
            walked = _unpack_bundle(repository, git_dir, ref=ref)
        else:
            walked, shallow = _link_objects(_git_directory(repository), git_dir, ref=ref)
        refs = _peel(list_refs(repository, tip=tip), git_dir)
        yield IsolatedStore(git_dir, tip, _short(walked), refs, shallow)


def names_by_commit(refs: dict[str, str], prefix: str = "refs/") -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name in sorted(refs):
        if name.startswith(prefix) and (short := _short(name)) is not None:
            names.setdefault(refs[name], []).append(short)
    return names


def first_tags(parents: dict[str, list[str]], tags: dict[str, list[str]]) -> dict[str, str]:
    """Map each commit to the first tag in the walk that contains it; visit each commit once."""
    found: dict[str, str] = {}
    # In the order of the walk, so that the first tag to reach a commit is the earliest.
    for tagged in parents:
        ahead = [tagged] if tagged in tags else []
        while ahead:
            commit_id = ahead.pop()
            if commit_id not in found:
                found[commit_id] = tags[tagged][0]
                ahead.extend(parent for parent in parents[commit_id] if parent not in found)
    return found


def _git_directory(repository: Path) -> Path:
    """Find a repository's git directory, whoever owns it: none of its settings apply here."""
    failure = (
        f"{repository}: not a git repository (its files alone, as in a zip, have no commits); set"
        " the source's path to a clone or a .bundle file, or remove the expert from config.yaml"
    )
    place = repository / ".git"
    if place.is_file():
        # A working tree or submodule: the file names its git directory.
        pointer = place.read_bytes()[:8192].decode("utf-8", "surrogateescape")
        place = repository / pointer.removeprefix("gitdir:").strip()
    elif not place.is_dir():
        place = repository
    if not (place / "HEAD").is_file():
        raise DataError(failure)
    run_git(place, "rev-parse", "--git-dir", failure=failure, timeout_s=TIMEOUT_S)
    return place.absolute()


def _link_objects(place: Path, git_dir: Path, *, ref: str) -> tuple[str, frozenset[str]]:
    """Link a repository's objects; return the full name of ``ref``, and shallow commits."""

    def parse(*arguments: str) -> str:
        failure = f"{place}: its branches cannot be read"
        found = run_git(place, "rev-parse", *arguments, failure=failure, timeout_s=TIMEOUT_S)
        return found.removesuffix("\n")

    # Git answers with paths relative to the current folder, or absolute ones.
    objects, shallow = (Path(parse("--git-path", n)).absolute() for n in ("objects", "shallow"))
    (git_dir / "objects").symlink_to(objects)
    boundary = _ID.findall(shallow.read_text("ascii", "replace")) if shallow.is_file() else []
    if boundary:
        (git_dir / "shallow").write_text("".join(f"{line}\n" for line in boundary), "ascii")
    return parse("--symbolic-full-name", ref).strip(), frozenset(boundary)


def _unpack_bundle(bundle: Path, git_dir: Path, *, ref: str) -> str:
    """Unpack a bundle's objects; return the full name of ``ref``, "" if none."""
    (git_dir / "objects").mkdir()
    failure = f"{bundle}: the bundle cannot be unpacked; it must be complete, not incremental"
    run_git(git_dir, "bundle", "unbundle", str(bundle.absolute()), failure=failure)
    heads = list_refs(bundle)
    full = _full_name(heads, ref) or ""
    if full == "HEAD":
        # A bundle does not name the branch of its HEAD.
        branches = ["refs/heads/main", "refs/heads/master", *sorted(heads)]
        same = (name for name in branches if heads.get(name) == heads["HEAD"])
        full = next((name for name in same if name.startswith("refs/heads/")), "")
    return full


def _peel(refs: dict[str, str], git_dir: Path) -> dict[str, str]:
    """Resolve annotated tags to commits; omit a HEAD, and refs that lead to none."""
    names = {name: object_id for name, object_id in refs.items() if _short(name)}
    asked = "".join(f"{object_id}^{{commit}}\n" for object_id in names.values())
    command = ("cat-file", "--batch-check=%(objectname) %(objecttype)")
    failure = "the commits of branches and tags cannot be read"
    answers = run_git(git_dir, *command, stdin=asked.encode(), failure=failure).splitlines()
    # For an id that leads to no commit, git answers "… missing".
    found = zip(names, map(str.split, answers), strict=True)
    return {name: answer[0] for name, answer in found if answer[1:] == ["commit"]}


def _short(name: str) -> str | None:
    found = re.fullmatch(r"refs/(?:heads|tags)/(.*)", name)
    return found and found[1].encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _full_name(heads: dict[str, str], ref: str) -> str | None:
    names = (ref, f"refs/tags/{ref}", f"refs/heads/{ref}")
    return next((name for name in names if name in heads), None)
