"""Read the commits of a git repository or bundle as records, without checking anything out.

One walk lists the commits; two long-lived processes (``cat-file --batch``, ``diff-tree --stdin``)
then answer commit by commit, so memory holds one commit at a time and no process is started per
commit. No hook, external diff, text conversion or replacement object of the repository is used.
"""

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from expertflow.core.errors import DataError
from expertflow.data.sources.git_objects import Commit, read_changes, read_commit
from expertflow.data.sources.git_process import ask, git_directory, opened, pipe, run_git

_TRAILER = re.compile(r"^([A-Za-z-]+-by): *([^<\n]*?) *<([^>\n]*)>", re.MULTILINE)
_E_MAIL = re.compile(r"<?[\w.+-]+@[\w-]+(?:\.[\w-]+)+>?")
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


def head(repository: Path, *, ref: str = "HEAD") -> str:
    """Return the id of the commit that pins all content: that of ``ref``.

    A bundle's id is read from its header, without unpacking it.
    """
    if ref.startswith("-"):
        raise DataError(f"options.ref: {ref!r} is no name of a branch, tag or commit")
    if not repository.is_file():
        commit = ["rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"]
        return run_git(git_directory(repository), *commit, failure=_no_ref(repository, ref)).strip()
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
    with opened(repository) as git_dir:
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
    with pipe(git_dir, "cat-file", "--batch") as cat, pipe(git_dir, *_DIFF, *paths) as diff:
        for commit_id in walk.split():
            commit = read_commit(cat, commit_id)
            author = _pseudonym(contributors, name=commit.name, e_mail=commit.e_mail)
            if not _selected(commit, options):
                continue
            # diff-tree echoes a line that is no commit id; that marks where an answer ends.
            ask(diff, commit_id.encode() + b"\n" + sentinel)
            changes = read_changes(diff, sentinel=sentinel, max_bytes=options.max_diff_bytes)
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


def _selected(commit: Commit, options: GitOptions) -> bool:
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
