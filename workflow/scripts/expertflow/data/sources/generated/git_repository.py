"""Generate a small git repository of commits to a service, and read its history."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from expertflow.data.sources.generated.generator import write_records
from expertflow.data.sources.git import extract_commits
from expertflow.data.sources.git_options import GitOptions
from expertflow.data.sources.git_store import run_git

# 2024-01-01 09:00 UTC; commits follow each other by minutes or hours.
FIRST_SECOND = 1_704_099_600
# The last two of every eight commits are on a branch, which is merged immediately.
CYCLE, BRANCH_AT = 8, 6
TAG_EVERY = 40
_AUTHORS = ("Ada Berg", "Ben Costa", "Clara Novak", "Elena Rossi", "Hugo Weber")
_NOUNS = (
    *("order", "invoice", "user", "ticket", "report", "event", "account", "message", "product"),
    *("payment", "session", "task", "device", "room", "course", "flight", "team", "parcel"),
)
_VERBS = ("load", "save", "check", "count", "send", "find", "close", "merge", "sort", "export")
_SETTINGS = ("timeout", "retries", "workers", "batch", "limit", "port", "delay", "history")
_KEYS = ("name", "status", "total", "owner", "date", "price", "city", "level")

Files = dict[str, list[str]]
# Path of the changed file, commit message.
Change = tuple[str, str]


def generate(*, n_documents: int, seed: int, directory: Path) -> dict[str, Path]:
    """Write ``repository.git`` and ``records.jsonl``; equal arguments give equal commit ids."""
    repository = directory / "repository.git"
    options = ("--quiet", "--bare", "--template=", "--initial-branch=main")
    run_git(None, "init", *options, str(repository), failure=f"{repository}: cannot be created")
    stream = "".join(export_history(n_commits=n_documents, seed=seed)).encode()
    run_git(repository, "fast-import", "--quiet", stdin=stream, failure="git fast-import failed")
    commits = extract_commits(repository, GitOptions(), Counter())
    write_records(directory, ({"id": record["commit"], **record} for record in commits))
    return {"repository": repository}


def export_history(*, n_commits: int, seed: int) -> Iterator[str]:
    """Yield a fast-import stream of ``n_commits`` commits, plus a merge after each branch."""
    rng = Random(seed)
    files: Files = {}
    mark, base, clock = 0, 0, FIRST_SECOND
    on_branch: dict[str, None] = {}
    for number in range(n_commits):
        if number % CYCLE == BRANCH_AT:
            base, on_branch = mark, {}
        path, message = rng.choice(_CHANGES)(rng, files)
        on_branch[path] = None
        clock += rng.randrange(300, 20_000)
        author = rng.choice(_AUTHORS)
        yield _commit(mark + 1, [mark], author, clock, f"{message}\n")
        yield _file(path, files)
        mark += 1
        if number % CYCLE == CYCLE - 1:
            clock += 600
            message = f"Merge branch 'topic-{number // CYCLE + 1}'\n"
            yield _commit(mark + 1, [base, mark], author, clock, message)
            # A merge has its first parent's files plus the branch's changes.
            yield from (_file(path, files) for path in on_branch)
            mark += 1
        if number % TAG_EVERY == TAG_EVERY - 1:
            yield f"reset refs/tags/v0.{number // TAG_EVERY + 1}\nfrom :{mark}\n\n"


def _commit(mark: int, parents: list[int], author: str, clock: int, message: str) -> str:
    who = f"{author} <{author.lower().replace(' ', '.')}@example.org> {clock} +0100"
    head = f"commit refs/heads/main\nmark :{mark}\nauthor {who}\ncommitter {who}\n"
    links = zip(("from", "merge"), parents, strict=False)
    return head + _data(message) + "".join(f"{word} :{mark}\n" for word, mark in links if mark)


def _file(path: str, files: Files) -> str:
    return f"M 100644 inline {path}\n" + _data("".join(f"{line}\n" for line in files[path]))


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}\n"


def _add_function(rng: Random, files: Files) -> Change:
    noun, verb, key = rng.choice(_NOUNS), rng.choice(_VERBS), rng.choice(_KEYS)
    path = f"src/{noun}.py"
    lines = files.setdefault(path, [f'"""Work with {noun}s."""'])
    lines += [
        *("", "", f"def {verb}_{noun}s_by_{key}({noun}s: list[dict]) -> list[dict]:"),
        f'    """{verb.capitalize()} {noun}s by their {key}."""',
        f'    return [{noun} for {noun} in {noun}s if {noun}["{key}"]]',
    ]
    return path, (
        f"feat({noun}): {verb} {noun}s by {key}\n\n"
        f"Add {verb}_{noun}s_by_{key}, which skips every {noun} without a {key}."
    )


def _add_test(rng: Random, files: Files) -> Change:
    noun, verb, key = rng.choice(_NOUNS), rng.choice(_VERBS), rng.choice(_KEYS)
    path = f"tests/test_{noun}.py"
    lines = files.setdefault(path, [f"from src import {noun}"])
    lines += [
        *("", "", f"def test_{verb}_by_{key}() -> None:"),
        f'    rows = [{{"{key}": {rng.randint(1, 9)}}}]',
        f"    assert {noun}.{verb}_{noun}s_by_{key}(rows) == rows",
    ]
    return path, f"test({noun}): {verb} by {key}"


def _add_interface(rng: Random, files: Files) -> Change:
    noun, key = rng.choice(_NOUNS), rng.choice(_KEYS)
    path = f"web/{noun}.ts"
    name, kind = noun.capitalize(), rng.choice(("string", "number"))
    lines = files.setdefault(path, [f"export interface {name} {{", "  id: number;", "}"])
    # Numbered by line, since an interface cannot have two fields with the same name.
    lines.insert(lines.index("}"), f"  {key}{len(lines)}: {kind};")
    return path, f"feat(web): give {noun} a {key}\n\nThe field is a {kind}."


def _set_value(rng: Random, files: Files) -> Change:
    lines = files.setdefault("config/service.yaml", [f"{name}: 1" for name in _SETTINGS])
    at, value = rng.randrange(len(lines)), rng.randint(2, 99)
    name, old = lines[at].split(": ")
    # A commit that changes nothing has no diff to learn.
    value = value if value != int(old) else value + 1
    lines[at] = f"{name}: {value}"
    verb = "raise" if value > int(old) else "lower"
    return "config/service.yaml", f"config: {verb} {name} to {value}\n\nIt was {old}."


def _write_docs(rng: Random, files: Files) -> Change:
    noun, verb = rng.choice(_NOUNS), rng.choice(_VERBS)
    path = f"docs/{noun}.md"
    lines = files.setdefault(path, [f"# {noun.capitalize()}s"])
    n_seen = sum(line.startswith("## ") for line in lines) + 1
    lines += ["", f"## {n_seen}. {verb.capitalize()} {noun}s", f"How to {verb} {noun}s."]
    return path, f"docs: how to {verb} {noun}s"


_CHANGES: tuple[Callable[[Random, Files], Change], ...] = (
    *(_add_function, _add_test, _add_interface),
    *(_set_value, _write_docs),
)
