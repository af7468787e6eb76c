"""Read the commits of a git repository or bundle as records, without a checkout.

A first walk lists commits and contributors; long-lived processes (``cat-file``, ``diff-tree
--stdin``) then answer commit by commit, so memory holds a few at a time. Files over 1 MiB count as
binary. Repository settings are ignored: see ``git_store``. In a record, ``author`` is null if
unnamed, ``authored_at`` if missing or absurd, line counts for binary files, ``branch`` for a bare
id; ``tag`` is the first in the walk that contains the commit; ``bytes_replaced`` marks text with
replacement characters. Secrets are filtered later, when documents are prepared.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.files import replacing, sha256_json
from expertflow.data.read import describe_file
from expertflow.data.records import Fields, SourceLock
from expertflow.data.secrets import replace_emails
from expertflow.data.sources import git_objects, git_store
from expertflow.data.sources.base import DataSource, Fetched, Found, Pinned, Pins
from expertflow.data.sources.git_options import GitOptions

NAME_CHARS = 200
_TRAILER = re.compile(r"^([ \t]*[A-Za-z][A-Za-z-]*-[Bb]y):([^<\n]*)<([^>\n]*)>", re.MULTILINE)
# Such as "Reported-by: Ann Lee (by phone)"; an address may follow the name, but not in brackets.
_UNADDRESSED = re.compile(
    r"^([ \t]*[A-Za-z][A-Za-z-]*ed(?:-off)?-[Bb]y):[ \t]*(?![^\n]*<)(?=[^\W\d_])"
    rf"((?:(?![^\s@]{{0,64}}@)[^#/:(\d\n]){{1,{NAME_CHARS}}})(?!\w)",
    re.MULTILINE,
)
_WORD = re.compile(r"\w+")
# Committer address of the hosting site itself, for merges made there.
_SITES = {"noreply@github.com"}


class GitRepository(DataSource):
    kind = "git"
    required = ("path",)
    option_type = GitOptions
    # A history still contains what was removed from the files long ago.
    scan_secrets = True

    def look_up(self) -> Found:
        if self.path.is_file():
            return Found("found", self.path.stat().st_size)
        return Found("found" if self.path.is_dir() else "missing")

    def pin(self, pins: Pins) -> Pinned:
        tip = git_store.resolve_commit(self.path, ref=self.options.ref)
        # Records list the branches and tags of their commits.
        refs = sha256_json(git_store.list_refs(self.path, tip=tip))
        identity = {"path": str(self.path), "options": self.spec.options, "refs": refs}
        return Pinned(revision=tip, identity=identity)

    def fetch(self, lock: SourceLock, directory: Path) -> Fetched:
        path, output = self.path, directory / "records.jsonl"
        if git_store.resolve_commit(path, ref=self.options.ref) != lock.revision:
            raise DataError(f"{path}: its history changed since the workflow started; run again")
        skipped: Counter[str] = Counter()
        n_replaced = 0
        with replacing(output) as partial, partial.open("w", encoding="utf-8") as stream:
            for commit in extract_commits(path, self.options, skipped):
                n_replaced += commit["bytes_replaced"]
                stream.write(json.dumps(commit, ensure_ascii=False) + "\n")
        counts = ", ".join(f"{n} by {reason}" for reason, n in sorted(skipped.items()))
        notes = [f"commits left out: {counts}"] if counts else []
        if n_replaced:
            notes.append(
                f"{n_replaced:,} of the commits: bytes invalid in their own encoding and in UTF-8"
                " became U+FFFD"
            )
        return Fetched((replace(describe_file(output), notes=tuple(notes)),))


def extract_commits(
    repository: Path, options: GitOptions, skipped: Counter[str]
) -> Iterator[Fields]:
    """Yield one record per commit, parents before children; DataError if there is none.

    ``skipped`` counts omitted commits by the first reason that applies: merge, date, author,
    shallow (parents missing from a shallow clone), paths, languages, too_many_files and big_files
    (more than git can exclude).
    """
    is_empty = True
    with git_store.open_store(repository, ref=options.ref) as store:
        with closing(git_objects.HistoryReader(store.git_dir, options)) as reader:
            for record in _History(store, reader, skipped).read_records():
                is_empty = False
                yield record
    if is_empty:
        why = ", ".join(f"{reason} {n}" for reason, n in sorted(skipped.items()))
        fix = f"widen the options (left out: {why})" if why else "set options.ref to another ref"
        raise DataError(f"{repository}: no commit of {options.ref} is selected; {fix}")


class _History:
    def __init__(
        self,
        store: git_store.IsolatedStore,
        reader: git_objects.HistoryReader,
        skipped: Counter[str],
    ) -> None:
        self.store, self.reader, self.skipped = store, reader, skipped
        self.options = reader.options
        listed = git_store.run_git(
            *(store.git_dir, "rev-list", "--reverse", "--topo-order", "--parents", store.tip),
            failure=f"the history of {self.options.ref} cannot be read",
        )
        # A line of --parents is "id parent parent …"; by --topo-order parents come before their
        # children.
        lines = (line.split(" ") for line in listed.splitlines())
        self.parents = {commit_id: parents for commit_id, *parents in lines}
        self.tags = git_store.first_tags(
            self.parents, git_store.names_by_commit(store.refs, "refs/tags/")
        )
        self.refs = git_store.names_by_commit(store.refs)
        self.contributors = Contributors()

    def read_records(self) -> Iterator[Fields]:
        for part in git_objects.split_batches(self._select()):
            batch = self.reader.read_touched(part, self.skipped)
            commits = self.reader.read_commits(list(batch))
            for (commit_id, touched), commit in zip(batch.items(), commits, strict=True):
                changes = self.reader.read_changes(commit_id, touched)
                # Counted only now: sizes are asked for one commit at a time.
                if changes is None:
                    self.skipped["big_files"] += 1
                elif self.options.languages and not changes.files:
                    # A pattern like "*.[jt]s", which pathspecs cannot combine with an ending.
                    self.skipped["languages"] += 1
                else:
                    yield self._record(commit_id, commit, changes)

    def _select(self) -> list[str]:
        selected = []
        commits = self.reader.read_commits(list(self.parents))
        for commit_id, commit in zip(self.parents, commits, strict=True):
            self.contributors.add_commit(commit)
            reason = self._reason_against(commit_id, commit)
            if reason:
                self.skipped[reason] += 1
            else:
                selected.append(commit_id)
        return selected

    def _reason_against(self, commit_id: str, commit: git_objects.Commit) -> str | None:
        options = self.options
        if options.merges == "skip" and len(self.parents[commit_id]) > 1:
            return "merge"
        if not options.takes_date(commit.authored_at):
            return "date"
        who = f"{commit.author.name} <{commit.author.e_mail}>".lower()
        if options.authors and not any(author.lower() in who for author in options.authors):
            return "author"
        return "shallow" if commit_id in self.store.shallow else None

    def _record(
        self, commit_id: str, commit: git_objects.Commit, changes: git_objects.Changes
    ) -> Fields:
        author: str | None = commit.author.name or None
        message, files, diff = commit.message, changes.files, changes.diff
        if self.options.pseudonymize:
            hide = self.contributors.hide_names
            author = self.contributors.find_label(commit.author)
            message = hide(message, is_message=True)
            diff = hide(diff)
            for file in files:
                file["path"] = hide(file["path"])
                file["renamed_from"] = file["renamed_from"] and hide(file["renamed_from"])
        parents, when = self.parents[commit_id], commit.authored_at
        record = {
            "commit": commit_id,
            "parents": parents,
            "author": author,
            "authored_at": when.isoformat().replace("+00:00", "Z") if when else None,
            "subject": message.lstrip("\n").partition("\n")[0],
            "message": message,
            "message_truncated": not commit.is_whole,
            "files": files,
            "n_files": len(files),
            "n_added": sum(file["n_added"] or 0 for file in files),
            "n_deleted": sum(file["n_deleted"] or 0 for file in files),
            "changes": "".join(map(_change_line, files)),
            "diff": diff,
            "diff_truncated": changes.is_truncated,
            "bytes_replaced": commit.replaced or changes.replaced,
            "is_merge": len(parents) > 1,
            "branch": self.store.walked,
            "refs": self.refs.get(commit_id, []),
            "tag": self.tags.get(commit_id),
        }
        return record | {"narrative": _narrative(record)}


def _narrative(record: Fields) -> str:
    day = record["authored_at"]
    when = f"on {day[:10]}" if day else "at an unknown time"
    written = f"Written {when} by {record['author'] or 'an unknown author'}"
    where = f", on {record['branch']}" if record["branch"] else ""
    since = f", in {record['tag']}" if record["tag"] else ""
    merge = f"It merges {len(record['parents'])} lines of work.\n" if record["is_merge"] else ""
    total = f"{record['n_files']} {'file' if record['n_files'] == 1 else 'files'}"
    counts = f"+{record['n_added']} -{record['n_deleted']}"
    cut = "(The diff goes on.)\n" if record["diff_truncated"] else ""
    parts = (
        f"Commit {record['commit'][:12]}\n{written}{where}{since}.\n{merge}",
        record["message"].strip("\n") + "\n",
        f"Changes in {total}, {counts}:\n{record['changes']}",
        record["diff"] + cut,
    )
    return "\n".join(part for part in parts if part.strip())


def _change_line(file: git_objects.FileChange) -> str:
    # Quote a path that would break its line.
    names = filter(None, (file["renamed_from"], file["path"]))
    path = " => ".join(name if name.isprintable() else json.dumps(name) for name in names)
    is_binary = file["n_added"] is None
    counts = "binary" if is_binary else f"+{file['n_added']} -{file['n_deleted']}"
    return f"{path} | {counts}\n"


class Contributors:
    """Hide who wrote a history: numbers replace contributors' names and addresses in texts.

    Hidden: the author; names in trailers such as Co-authored-by or Reported-by; known
    contributors' names in messages (single words only if capitalized: "Julian", but not "test");
    names of two or more words in diffs and paths; and all e-mail addresses. Known contributors are
    all authors, committers and signers of the walked history, whatever is selected. Not caught:
    nicknames ("@ann"), single names in diffs, other spellings or case, names split across lines,
    non-contributors, names of branches and tags, and what the code itself says about its authors.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._labels: dict[str, str] = {}
        # Indexed by first word, so that the time does not grow with the number of contributors.
        self._lengths: defaultdict[str, set[int]] = defaultdict(set)

    def add_commit(self, commit: git_objects.Commit) -> None:
        self._add_person(commit.author)
        if commit.committer.e_mail.lower() not in _SITES:
            self._add_person(commit.committer)
        for _, name, e_mail in _TRAILER.findall(commit.message):
            self._add_person(git_objects.Person(name.strip(), e_mail.strip()))

    def find_label(self, person: git_objects.Person) -> str | None:
        number = self._numbers.get(person.key)
        return f"Contributor {number}" if number else None

    def hide_names(self, text: str, *, is_message: bool = False) -> str:
        def hide_trailer(match: re.Match[str]) -> str:
            person = git_objects.Person(match[2].strip(), match[3].strip())
            return f"{match[1]}: {self.find_label(person) or 'somebody'}"

        def hide_name(match: re.Match[str]) -> str:
            name = match[2].rstrip()
            rest = match[2][len(name) :]
            return f"{match[1]}: {self._labels.get(name, 'somebody')}{rest}"

        if is_message:
            text = _UNADDRESSED.sub(hide_name, text)
            text = _TRAILER.sub(hide_trailer, text)
        text = replace_emails(text)
        parts: list[str] = []
        done = 0
        for word in _WORD.finditer(text):
            if word.start() < done:
                continue
            # Longest first: "Ann Lee Berg" must not become "Contributor 1 Berg".
            for length in sorted(self._lengths.get(word[0], ()), reverse=True):
                end = word.start() + length
                name = text[word.start() : end]
                # The name may be the start of a longer word: "Ann" in "Anna".
                if name not in self._labels or _WORD.match(text, end):
                    continue
                if is_message or " " in name:
                    parts += (text[done : word.start()], self._labels[name])
                    done = end
                    break
        return "".join((*parts, text[done:]))

    def _add_person(self, person: git_objects.Person) -> None:
        if not person.key:
            return
        number = self._numbers.setdefault(person.key, len(self._numbers) + 1)
        name = person.name.lstrip("\"'([<-. ")[:NAME_CHARS].rstrip("\"')]>. ")
        first = _WORD.match(name)
        if first is None or len(name) < 3 or (" " not in name and name == name.lower()):
            return
        self._labels.setdefault(name, f"Contributor {number}")
        self._lengths[first[0]].add(len(name))
