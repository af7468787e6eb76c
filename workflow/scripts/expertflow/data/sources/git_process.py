"""Run git apart from all settings of the user, the machine and, as far as can be, a repository."""

import contextlib
import io
import os
import subprocess
from pathlib import Path
from typing import cast

from expertflow.core.errors import DataError

# A file larger than this counts as binary: git neither loads it nor compares its lines.
BIG_FILE_BYTES = 1 << 20
# Settings that would let files of others change what is run or read.
_SAFE = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
    *("-c", "core.attributesFile=/dev/null", "-c", "core.commitGraph=false"),
    *("-c", "core.multiPackIndex=false", "-c", f"core.bigFileThreshold={BIG_FILE_BYTES}"),
    *("-c", "diff.renameLimit=400", "-c", "protocol.allow=never"),
)
ENDED_EARLY = "git ended early: an object is missing (a partial clone?) or damaged; run git fsck"


class Pipe:
    """A git command that answers question by question; it starts with the first one."""

    def __init__(self, git_dir: Path, *arguments: str) -> None:
        self._command = _command(git_dir, *arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes) -> io.BufferedReader:
        """Send one question; return where the answer is read.

        Raises:
            DataError: git gave up, as it does when an object is missing or damaged.
        """
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
        """End the command; the next question starts it anew."""
        if self._process is None:
            return
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
    """Run one git command apart from all user settings and hooks; return what it prints.

    Bytes that are no UTF-8 become lone surrogates.

    Raises:
        DataError: ``failure`` and git's last line, or git is missing.
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
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        said = "".join(sign if sign.isprintable() else "?" for sign in said)
        raise DataError(f"{failure} ({said})" if said else failure)
    return done.stdout.decode("utf-8", "surrogateescape")


def _command(git_dir: Path | None, *arguments: str) -> list[str]:
    # As a bare repository: attributes and submodules of a working tree must not change a diff.
    place = (f"--git-dir={git_dir}", "-c", "core.bare=true") if git_dir else ()
    return ["git", *_SAFE, *place, *arguments]


def _environment() -> dict[str, str]:
    """Hide the user's and the machine's git settings; forbid every way to fetch objects."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return kept | {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_GRAFT_FILE": os.devnull,
        "GIT_NO_LAZY_FETCH": "1",
        # Older git knows no GIT_NO_LAZY_FETCH; with no protocol allowed its fetch fails at once,
        # before it starts a program that the repository names.
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
