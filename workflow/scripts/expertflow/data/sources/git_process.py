"""Run git apart from all user settings, hooks and filters of a repository."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from expertflow.core.errors import DataError

# Settings that would let the repository, or another owner's files, change what is run or read.
_SAFE = (
    *("-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
    *("-c", "protocol.allow=never", "-c", "protocol.file.allow=always"),
    *("-c", "core.attributesFile=/dev/null", "-c", "diff.renameLimit=1000"),
)


def git_directory(repository: Path) -> Path:
    """Find the git directory of a repository, bare or not; no folder above it counts."""
    failure = f"{repository}: not a git repository; give its directory or a .bundle file"
    if not repository.is_dir():
        raise DataError(failure)
    command = ("-C", str(repository), "rev-parse", "--absolute-git-dir")
    return Path(run_git(None, *command, failure=failure, ceiling=repository).rstrip("\n"))


@contextlib.contextmanager
def opened(repository: Path) -> Iterator[Path]:
    """Give the git directory of a repository; a bundle is unpacked for as long as it is read."""
    if repository.is_dir():
        yield git_directory(repository)
        return
    with tempfile.TemporaryDirectory(prefix="bundle-") as directory:
        target = Path(directory) / "repository.git"
        options = ("--quiet", "--bare", "--no-hardlinks", "--template=")
        command = ("clone", *options, "-c", "core.hooksPath=/dev/null")
        failure = f"{repository}: the bundle cannot be unpacked; it must be whole, not incremental"
        run_git(None, *command, str(repository.absolute()), str(target), failure=failure)
        yield target


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A git command that answers question by question."""

    stdin: IO[bytes]
    stdout: IO[bytes]


def ask(process: Process, question: bytes) -> None:
    """Send one question."""
    process.stdin.write(question)
    process.stdin.flush()


@contextlib.contextmanager
def pipe(git_dir: Path, *arguments: str) -> Iterator[Process]:
    """Keep one git command running for as long as the block lasts."""
    process = subprocess.Popen(
        _command(git_dir, *arguments),
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        yield Process(stdin=process.stdin, stdout=process.stdout)
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
