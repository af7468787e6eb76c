"""Ask git what commits change, so that no answer and no file is too big."""

import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from expertflow.data.sources.git_objects import (
    Changes,
    Touched,
    big_paths,
    read_changes,
    read_touched,
    with_big_files,
)
from expertflow.data.sources.git_options import GitOptions
from expertflow.data.sources.git_process import Pipe
from expertflow.data.sources.git_store import Store

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


def touched_by(
    pipes: Pipes, batch: list[str], options: GitOptions, skipped: Counter[str]
) -> dict[str, Touched]:
    """Look which files the commits of a batch touch, and keep those that are to be shown."""
    touched = read_touched(
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
    big = big_paths(pipes.sizes, touched)
    if not big:
        return _read(pipes.patch, pipes, commit_id, options)
    # Git would load them, to show them or to look for renames: they are named, and not asked for.
    if len(big) > MAX_EXCLUDED_FILES or sum(map(len, big)) > MAX_EXCLUDED_BYTES:
        return None
    excluded = [f":(exclude,literal){os.fsdecode(path)}" for path in big]
    command = (*_DIFF_TREE, *_PATCH, "--", *(options.pathspecs() or ["*"]), *excluded)
    with contextlib.closing(store.pipe(*command)) as patch:
        return with_big_files(_read(patch, pipes, commit_id, options), big)


def _read(patch: Pipe, pipes: Pipes, commit_id: str, options: GitOptions) -> Changes:
    return read_changes(patch, commit_id, sentinel=pipes.sentinel, max_bytes=options.max_diff_bytes)
