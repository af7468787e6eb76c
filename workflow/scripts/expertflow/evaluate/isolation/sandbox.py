"""Run an untrusted program in its own namespaces through bubblewrap, or not at all.

    expertflow ── bwrap (uid 65534 when we are root) ── namespaces ── prlimit ── the program
       │                                                                             │
       └── wall clock, kills all of it            stdin, a file for its output only ──┘

Inside are the program, its linked libraries and an empty /tmp; no network, other processes,
environment variables, host files, or other writable folder.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Literal

import psutil

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record

# The kernel's overflow user, who owns nothing.
NOBODY = 65534
_INSIDE = "/program"


class SandboxLimits(Record, frozen=True, kw_only=True):
    """``data_bytes`` is written memory (V8 reserves more); ``wall_s`` ends sleeping programs."""

    cpu_s: int = 5
    wall_s: float = 30.0
    data_bytes: int = 1 << 30
    output_bytes: int = 64_000
    file_bytes: int = 1_000_000
    tmp_bytes: int = 16_000_000
    n_processes: int = 64
    n_open_files: int = 64


class Ended(Record, frozen=True, kw_only=True):
    how: Literal["exited", "timed_out", "too_much_output"]
    exit_code: int | None
    output: bytes


class Sandbox:
    """Runs programs, each in a new sandbox; must be closed."""

    def __init__(self, program: Path, limits: SandboxLimits) -> None:
        self._limits = limits
        self._scratch: TemporaryDirectory[str] | None = None
        self._command = _command(self._reachable(program.resolve()), limits)

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    def start(
        self, arguments: Sequence[str], files: Sequence[int], output: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        """Start a program that inherits the open ``files`` under the same numbers.

        It prints to the file ``output``, so its limit on files ends what it prints.
        """
        return subprocess.Popen(
            [*self._command, _INSIDE, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={},
            start_new_session=True,  # Ctrl-C reaches us, and we end it
            pass_fds=files,
            # Root can read its files even in a user namespace, so root is dropped first.
            user=NOBODY if _is_root() else None,
            group=NOBODY if _is_root() else None,
            extra_groups=[] if _is_root() else None,
        )

    def finish(self, process: "subprocess.Popen[bytes]", given: bytes, output: IO[bytes]) -> Ended:
        """Write ``given`` to a started program, wait for its end, and return how it ended."""
        how: Literal["exited", "timed_out", "too_much_output"] = "exited"
        try:
            process.communicate(given, timeout=self._limits.wall_s)
        except subprocess.TimeoutExpired:
            how = "timed_out"
        finally:
            # The other processes are in bwrap's PID namespace and end with it.
            process.kill()
            exit_code = process.wait()
        output.seek(0)
        text = output.read(self._limits.output_bytes + 1)
        if len(text) > self._limits.output_bytes:
            how = "too_much_output"
        return Ended(how=how, exit_code=exit_code if how == "exited" else None, output=text)

    def _reachable(self, program: Path) -> Path:
        """Copy a program that only root can reach to where the user ``nobody`` can read it."""
        # Others need x on each folder, and r and x on the file.
        folders_open = all(parent.stat().st_mode & 0o001 for parent in program.parents)
        if not _is_root() or (folders_open and program.stat().st_mode & 0o005 == 0o005):
            return program
        self._scratch = TemporaryDirectory(prefix="expertflow-sandbox-", ignore_cleanup_errors=True)
        folder = Path(self._scratch.name)
        folder.chmod(0o755)
        copy = folder / program.name
        shutil.copyfile(program, copy)
        copy.chmod(0o755)
        return copy


def find_tool(name: str, package: str) -> str:
    if (path := shutil.which(name)) is None:
        raise EvaluationError(f"{name} is not on PATH; install the system package {package}")
    return path


def bubblewrap_version() -> str:
    command = [find_tool("bwrap", "bubblewrap"), "--version"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return output.split()[-1] if output.split() else "unknown"


def _is_root() -> bool:
    return os.geteuid() == 0


def _command(program: Path, limits: SandboxLimits) -> list[str]:
    bwrap = find_tool("bwrap", "bubblewrap")
    prlimit = Path(find_tool("prlimit", "util-linux")).resolve()
    # The root file system has two programs and their libraries.
    files = {_INSIDE: program, "/prlimit": prlimit}
    files |= {name: Path(name).resolve() for name in _libraries(program) | _libraries(prlimit)}
    # Kernels before 5.14 count all processes of the user, so existing ones are added.
    user = NOBODY if _is_root() else os.geteuid()
    running = [one.info for one in psutil.process_iter(["num_threads", "uids"])]
    own = [one["num_threads"] for one in running if one["uids"] and one["uids"].real == user]
    return [
        bwrap,
        *("--unshare-user", "--disable-userns", "--uid", str(NOBODY), "--gid", str(NOBODY)),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-cgroup"),
        *("--unshare-uts", "--hostname", "sandbox", "--clearenv", "--cap-drop", "ALL"),
        # A new session, so that nothing can be injected into the caller's terminal.
        *("--new-session", "--die-with-parent"),
        *("--size", str(limits.tmp_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *(part for name in sorted(files) for part in ("--ro-bind", str(files[name]), name)),
        *("--remount-ro", "/"),
        # Set inside, where the kernel counts only the sandbox's processes. The soft limit signals a
        # program, the hard one kills it a second later.
        *("--", "/prlimit", "--core=0", f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}"),
        f"--data={limits.data_bytes}",
        *(f"--fsize={limits.file_bytes}", f"--nofile={limits.n_open_files}"),
        f"--nproc={limits.n_processes + sum(own)}",
    ]


def _libraries(program: Path) -> set[str]:
    command = [find_tool("ldd", "libc-bin"), str(program)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    words = (line.replace("=>", " ").split() for line in listed.stdout.splitlines())
    found = {word for line in words for word in line if word.startswith("/")}
    if listed.returncode != 0 or not found:
        raise EvaluationError(f"ldd cannot list libraries of {program}: {listed.stderr.strip()}")
    return found
