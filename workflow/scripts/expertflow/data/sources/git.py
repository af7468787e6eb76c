"""Read the commits of a git repository or bundle as records, without checking anything out.

A first walk lists the commits and learns who contributed; long-lived processes (``cat-file``,
``diff-tree --stdin``) then answer commit by commit, so that memory holds a few commits at a time
and no process is started per commit. Files over 1 MiB count as binary. Nothing that the repository
sets is obeyed: see ``git_store``.

Fields of a record, for the templates of a manifest:

- ``commit``, ``parents``: ids; ``is_merge``
- ``author``: "Contributor N", or the name where ``pseudonymise`` is off; null where nobody is named
- ``authored_at``: like 2024-03-01T21:30:00Z; null where it is missing or absurd
- ``subject``, ``message``: first line, and all; ``message_truncated`` after 1 MiB
- ``files``: ``path``, ``renamed_from``, ``n_added``, ``n_deleted`` (null for binary files) of each
- ``n_files``, ``n_added``, ``n_deleted``
- ``changes``: a line for each file, ``path | +added -deleted``
- ``diff``: the patch against the first parent, cut at the end of a line after ``max_diff_bytes``;
  ``diff_truncated``
- ``branch``: the branch or tag that was walked, null for a bare id; ``refs``: branches and tags
  that point at the commit; ``tag``: the first tag in the walk that contains it, or null
- ``narrative``: all of it as one readable text
- ``bytes_replaced``: some text was not valid and has replacement characters

What is pseudonymised, and what is not caught, is said in ``git_identities``. Credentials are looked
for where documents are prepared (``scan_secrets``), in what a document says.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.data.sources.git_identities import Contributors
from expertflow.data.sources.git_objects import (
    BATCH_IDS,
    Changes,
    Commit,
    Pipes,
    changes_of,
    open_pipes,
    read_commits,
    touched_by,
)
from expertflow.data.sources.git_options import GitOptions
from expertflow.data.sources.git_store import (
    Store,
    first_tags,
    head,
    names_by_commit,
    opened,
)
from expertflow.data.sources.git_text import changes_text, narrative

__all__ = ["extract_commits", "head"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    """What is known of the whole history before its commits are told one by one."""

    parents: dict[str, tuple[str, ...]]
    tags: dict[str, str]
    refs: dict[str, list[str]]
    branch: str | None
    contributors: Contributors


def extract_commits(
    repository: Path, *, options: dict[str, Any], skipped: Counter[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one record per commit, parents before children.

    ``skipped`` counts the commits left out, each under the first reason that holds: merge, date,
    author, shallow (a shallow clone lacks its parents), paths, languages, too_many_files, big_files
    (more of them than git can be told to leave out); and max_commits for those not looked at.

    Raises:
        DataError: no git, no repository or bundle, an unknown ref, or no commit is selected.
    """
    chosen = GitOptions.from_manifest(options)
    counts: Counter[str] = Counter() if skipped is None else skipped
    n_records = 0
    with opened(repository, ref=chosen.ref) as store, open_pipes(store, chosen) as pipes:
        for record in _records(store, pipes, chosen, counts):
            n_records += 1
            yield record
    if not n_records:
        why = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items()))
        raise DataError(
            f"{repository}: no commit of {chosen.ref} is selected; widen the options"
            + (f" (left out: {why})" if why else "")
        )


def _records(
    store: Store, pipes: Pipes, options: GitOptions, skipped: Counter[str]
) -> Iterator[dict[str, Any]]:
    listed = store.run(
        *("rev-list", "--reverse", "--topo-order", "--parents", store.tip),
        failure=f"the history of {options.ref} cannot be read",
    )
    parents: dict[str, tuple[str, ...]] = {}
    for line in listed.splitlines():
        commit_id, *others = line.split(" ")
        parents[commit_id] = tuple(others)
    context = _Context(
        parents=parents,
        tags=first_tags(parents, names_by_commit(store.refs, "refs/tags/")),
        refs=names_by_commit(store.refs),
        branch=store.walked,
        contributors=Contributors(),
    )
    selected = []
    for commit_id, commit in zip(parents, read_commits(pipes.cat, list(parents)), strict=True):
        context.contributors.meet(commit)
        reason = _reason_against(commit, options, n_parents=len(parents[commit_id]))
        if reason or commit_id in store.shallow:
            skipped[reason or "shallow"] += 1
        else:
            selected.append(commit_id)
    counts = skipped
    if options.max_commits is not None:
        selected = _newest(pipes, selected, options, skipped)
        counts = Counter()  # what _newest looked at has been counted
    for batch in _batches(selected):
        shown = touched_by(pipes, batch, options, counts)
        commits = read_commits(pipes.cat, list(shown))
        for (commit_id, touched), commit in zip(shown.items(), commits, strict=True):
            changes = changes_of(store, pipes, commit_id, touched, options)
            if changes is None:
                skipped["big_files"] += 1
                continue
            if options.languages and not changes.files:
                # A pattern like "*.[jt]s", which no pathspec joins with an ending.
                skipped["languages"] += 1
                continue
            yield _record(commit_id, commit, changes, context, options)


def _reason_against(commit: Commit, options: GitOptions, *, n_parents: int) -> str | None:
    if options.merges == "skip" and n_parents > 1:
        return "merge"
    if not options.takes_date(commit.authored_at):
        return "date"
    who = f"{commit.author.name} <{commit.author.e_mail}>".lower()
    if options.authors and not any(author.lower() in who for author in options.authors):
        return "author"
    return None


def _batches(commit_ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(commit_ids), BATCH_IDS):
        yield commit_ids[start : start + BATCH_IDS]


def _newest(
    pipes: Pipes, selected: list[str], options: GitOptions, skipped: Counter[str]
) -> list[str]:
    """Take the newest ``max_commits`` that touch wanted files; they keep their order."""
    taken: list[str] = []
    left = selected[::-1]
    while left and len(taken) < (options.max_commits or 0):
        batch = left[: min(BATCH_IDS, (options.max_commits or 0) - len(taken))]
        taken += touched_by(pipes, batch, options, skipped)
        left = left[len(batch) :]
    skipped["max_commits"] += len(left)
    return taken[::-1]


def _record(
    commit_id: str, commit: Commit, changes: Changes, context: _Context, options: GitOptions
) -> dict[str, Any]:
    hide = context.contributors.hide if options.pseudonymise else _as_it_is
    author = context.contributors.label(commit.author)
    message = hide(commit.message, is_message=True)
    files = [
        {
            "path": hide(file.path),
            "renamed_from": file.renamed_from and hide(file.renamed_from),
            "n_added": file.n_added,
            "n_deleted": file.n_deleted,
        }
        for file in changes.files
    ]
    when = commit.authored_at
    record = {
        "commit": commit_id,
        "parents": list(context.parents[commit_id]),
        "author": author if options.pseudonymise else commit.author.name or None,
        "authored_at": when.isoformat().replace("+00:00", "Z") if when else None,
        "subject": message.lstrip("\n").partition("\n")[0],
        "message": message,
        "message_truncated": not commit.is_whole,
        "files": files,
        "n_files": len(files),
        "n_added": sum(file.n_added or 0 for file in changes.files),
        "n_deleted": sum(file.n_deleted or 0 for file in changes.files),
        "changes": changes_text(files),
        "diff": hide(changes.diff),
        "diff_truncated": changes.is_truncated,
        "bytes_replaced": commit.replaced or changes.replaced,
        "is_merge": len(context.parents[commit_id]) > 1,
        "branch": context.branch,
        "refs": context.refs.get(commit_id, []),
        "tag": context.tags.get(commit_id),
    }
    return record | {"narrative": narrative(record)}


def _as_it_is(text: str, *, is_message: bool = False) -> str:
    return text
