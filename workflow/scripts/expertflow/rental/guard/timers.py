"""What ends a run besides its budget: idle cards, a standstill, a notice from the provider."""

import contextlib
import logging
import math
import os
import subprocess
import time
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import psutil

from expertflow.core.process import kill_group
from expertflow.hardware.nvml import Device, open_gpus

log = logging.getLogger(__name__)
GPU_EVERY_S, NOTICE_EVERY_S, NOTICE_PATIENCE_S = 2.0, 1.0, 5.0
# A card below this utilization is idle.
BUSY_PERCENT = 5.0
STALLED_CHECKS = 20
# A hanging training is still monitored: the monitor's readings are not a sign of life.
WATCHERS = frozenset({"gpu.jsonl", "monitor.json", "guard.json", ".guard"})
MONITOR = "monitor_gpu.py"
# Less than this share of one core, and less traffic (a slow download), counts as waiting.
ALIVE_CPU_FRACTION = 0.02
ALIVE_BYTES_PER_S = 10_000
# A shell's exit codes for a command that is not executable or not found.
CANNOT_RUN = (126, 127)


class IdleGpu:
    """Reports that no card was busy for some minutes; an unreadable card may be busy."""

    def __init__(self, stack: ExitStack, *, minutes: float) -> None:
        self._limit_s = 60 * minutes
        # Counts as busy at the start: nothing earlier is known.
        self._busy_s = self._due_s = time.monotonic()
        self._devices: tuple[Device, ...] = ()
        self.state = "off: --idle-minutes 0"
        if minutes > 0:
            gpus = stack.enter_context(open_gpus())
            self._devices = gpus.devices
            self._on = f"on: {len(gpus.devices)} cards, {minutes:g} min below {BUSY_PERCENT:g} %"
            self.state = self._on if gpus.reason is None else f"off: {gpus.reason}"

    def poll(self) -> str | None:
        now_s = time.monotonic()
        if not self._devices or now_s < self._due_s:
            return None
        self._due_s = now_s + GPU_EVERY_S
        shares = [device.read_figure("any_kernel_percent") for device in self._devices]
        known = [share for share in shares if share is not None]
        state = self._on if known else "off: the cards stopped reporting how busy they are"
        if state != self.state:
            self.state = state
            log.warning("idle timer %s", state)
        # A card without readings may be busy.
        if len(known) < len(shares) or max(known) >= BUSY_PERCENT:
            self._busy_s = now_s
        idle_s = now_s - self._busy_s
        if idle_s < self._limit_s:
            return None
        return f"no card was {BUSY_PERCENT:g} % busy for {idle_s / 60:.1f} min"


class Standstill:
    """Reports no file changes, CPU time or traffic for some minutes; 0 disables it."""

    def __init__(self, *, minutes: float, folders: Iterable[Path], pid: int) -> None:
        self._limit_s, self._folders, self._pid = 60 * minutes, tuple(folders), pid
        self._alive_s = self._checked_s = time.monotonic()
        self._files: dict[Path, tuple[int, int]] = {}
        self._work: dict[psutil.Process, tuple[float, int]] = {}

    def poll(self) -> str | None:
        now_s = time.monotonic()
        passed_s = now_s - self._checked_s
        # A twentieth of the limit: listing files on a network disk is slow.
        if not self._limit_s or passed_s < self._limit_s / STALLED_CHECKS:
            return None
        self._checked_s = now_s
        files, work = _list_files(self._folders), _measure_work(self._pid)
        # A new process counts from zero; an ended one drops out of both sums.
        before = [self._work.get(process, (0.0, 0)) for process in work]
        used_s = sum(cpu_s for cpu_s, _ in work.values()) - sum(cpu_s for cpu_s, _ in before)
        n_bytes = sum(n for _, n in work.values()) - sum(n for _, n in before)
        works = used_s > ALIVE_CPU_FRACTION * passed_s or n_bytes > ALIVE_BYTES_PER_S * passed_s
        if works or files != self._files:
            self._alive_s = now_s
        self._files, self._work = files, work
        idle_s = now_s - self._alive_s
        if idle_s < self._limit_s:
            return None
        return (
            f"no file changed, no CPU was used, nothing was transferred for {idle_s / 60:.1f} min"
        )


def _list_files(folders: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    found = {}
    for place, inner, names in chain.from_iterable(map(os.walk, folders)):
        # In place, because os.walk descends into the folders of this list.
        inner[:] = set(inner) - WATCHERS
        for path in (Path(place, name) for name in set(names) - WATCHERS):
            # The file vanished, or the disk did not respond this time.
            with contextlib.suppress(OSError):
                stat = path.stat()
                found[path] = (stat.st_size, stat.st_mtime_ns)
    return found


def _measure_work(pid: int) -> dict[psutil.Process, tuple[float, int]]:
    """Return CPU seconds and bytes moved, including sockets, of each process of the command."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if not any(argument.endswith(MONITOR) for argument in process.cmdline()):
                times, n_bytes = process.cpu_times(), 0
                # Some containers hide this; CPU time and files must suffice then.
                with contextlib.suppress(psutil.AccessDenied):
                    moved = process.io_counters()
                    n_bytes = moved.read_chars + moved.write_chars
                found[process] = (times.user + times.system, n_bytes)
    return found


class Notice:
    """Runs a user command that asks if the machine is being reclaimed: exit code 0 means yes."""

    def __init__(self, command: str | None) -> None:
        self._command = command
        self._asking: subprocess.Popen[bytes] | None = None
        self._asked_s = -math.inf
        self._has_warned = False

    def poll(self) -> str | None:
        now_s = time.monotonic()
        if self._asking is not None:
            code = self._asking.poll()
            if code is None:
                # A hung command reports nothing; the next one asks again.
                if now_s - self._asked_s > NOTICE_PATIENCE_S:
                    self.close()
                return None
            self._asking = None
            if code in CANNOT_RUN and not self._has_warned:
                self._has_warned = True
                log.warning("the notice command cannot be run (exit code %d); correct it", code)
            return "the notice command exited with 0" if code == 0 else None
        if self._command is not None and now_s >= self._asked_s + NOTICE_EVERY_S:
            self._asked_s, null = now_s, subprocess.DEVNULL
            # A command that cannot be started reports nothing, either.
            with contextlib.suppress(OSError):
                self._asking = subprocess.Popen(
                    self._command, shell=True, stdout=null, stderr=null, start_new_session=True
                )
        return None

    def close(self) -> None:
        if self._asking is not None:
            kill_group(self._asking)
            self._asking = None
