"""Timers stop runs that waste money, and leave alone those that work or cannot be judged."""

import logging
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support import wait_for

from expertflow.rental.guard import timers
from expertflow.rental.guard.timers import IdleGpu, Notice, Standstill

Patch = pytest.MonkeyPatch


class Clock:
    """Time that passes only when a test advances it."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: Patch) -> Clock:
    monkeypatch.setattr(timers, "time", Clock())
    return timers.time  # type: ignore[return-value]


def ends_after(
    clock: Clock, timer: IdleGpu | Standstill, look: Callable[[float], object] = float
) -> tuple[float, str] | None:
    """Query a timer twice a second for 20 s; return when and why it ended the run."""
    begun_s = clock.now_s
    for half_s in range(40):
        clock.now_s = begun_s + half_s / 2
        look(half_s / 2)
        if (why := timer.poll()) is not None:
            return half_s / 2, why
    return None


Cards = tuple[float | None, ...]


@pytest.mark.parametrize(
    ("read", "minutes", "state", "after_s"),
    [
        (lambda _: (4.9,), 0.1, "on: 1 cards, 0.1 min below 5 %", 6.0),
        (lambda _: (4.9, 0.0), 0.1, "on: 2 cards, 0.1 min below 5 %", 6.0),
        (lambda _: (5.0,), 0.1, "on: 1 cards, 0.1 min below 5 %", None),
        (lambda _: (0.0, 90.0), 0.1, "on: 2 cards, 0.1 min below 5 %", None),
        # Cards are read every two seconds: these were last seen busy after two.
        (lambda s: (90.0 if s < 3 else 0.0,), 0.1, "on: 1 cards, 0.1 min below 5 %", 8.0),
        # A card without readings may be busy.
        (lambda _: (0.0, None), 0.1, "on: 2 cards, 0.1 min below 5 %", None),
        (lambda s: (0.0 if s < 3 else None,), 0.1, "off: the cards stopped reporting", None),
        # One lost reading, at four seconds.
        (lambda s: (None if 3 < s < 5 else 0.0,), 0.1, "on: 1 cards, 0.1 min below 5 %", 10.0),
        (lambda _: (), 0.1, "off: no driver", None),
        (lambda _: (0.0,), 0, "off: --idle-minutes 0", None),
    ],
)
def test_only_cards_that_are_all_idle_end_a_run(
    read: Callable[[float], Cards], minutes: float, state: str, after_s: float | None,
    clock: Clock, monkeypatch: Patch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def device(card: int) -> SimpleNamespace:
        def read_figure(name: str) -> float | None:
            return {"any_kernel_percent": read(clock.now_s - 1000)[card]}[name]

        return SimpleNamespace(read_figure=read_figure)

    devices = tuple(map(device, range(len(read(0)))))
    gpus = SimpleNamespace(devices=devices, reason=None if devices else "no driver")
    monkeypatch.setattr(timers, "open_gpus", lambda: nullcontext(gpus))
    timer = IdleGpu(ExitStack(), minutes=minutes)
    with caplog.at_level(logging.WARNING):
        found = ends_after(clock, timer)
    assert found == (after_s and (after_s, "no card was 5 % busy for 0.1 min"))
    assert timer.state.startswith(state)
    assert caplog.text.count("stopped reporting") == (read(4) == (None,))


def test_a_notice_command_runs_every_second_with_a_five_second_limit(
    clock: Clock, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[SimpleNamespace] = []
    killed: list[SimpleNamespace] = []

    def ask(*_: object, **__: object) -> SimpleNamespace:
        if clock.now_s < 1000:
            raise BlockingIOError
        process = SimpleNamespace(code=None, poll=lambda: process.code)
        asked.append(process)
        return process

    def n_asked_at(now_s: float) -> int:
        clock.now_s = 1000 + now_s
        assert notice.poll() is None
        return len(asked)

    monkeypatch.setattr(subprocess, "Popen", ask)
    monkeypatch.setattr(timers, "kill_group", killed.append)
    notice = Notice("ask")
    assert n_asked_at(-1) == 0
    assert n_asked_at(0) == n_asked_at(0.1) == 1
    asked[0].code = 1
    assert [n_asked_at(at_s) for at_s in (0.2, 0.9, 1.0)] == [1, 1, 2]
    assert n_asked_at(6.0) == 2 and not killed
    assert n_asked_at(6.1) == 2 and killed == asked[1:]
    assert n_asked_at(6.1) == 3 and not caplog.messages
    # A missing command would never announce a notice.
    asked[2].code = 127
    assert n_asked_at(7.1) == 3 and n_asked_at(7.1) == 4
    asked[3].code = 127
    assert n_asked_at(8.1) == 4 and n_asked_at(8.1) == 5
    assert caplog.messages == ["the notice command cannot be run (exit code 127); correct it"]
    asked[4].code = 0
    assert notice.poll() == "the notice command exited with 0"
    assert Notice(None).poll() is None and len(asked) == 5


def test_a_notice_command_is_a_shells_and_its_output_is_not_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    notice = Notice("echo heard && echo >&2 heard")
    wait_for(lambda: notice.poll() == "the notice command exited with 0")
    assert capfd.readouterr() == ("", "")


class Worker(SimpleNamespace):
    __hash__ = object.__hash__


def worker(
    clock: Clock, cores: float, n_bytes: int | None = 0, program: str = "train.py"
) -> Worker:
    """Return a process that uses this share of a core and moves this many bytes per second."""

    def cpu_times() -> SimpleNamespace:
        half_s = cores * clock.now_s / 2
        return SimpleNamespace(user=half_s, system=half_s)

    def io_counters() -> SimpleNamespace:
        if n_bytes is None:
            raise psutil.AccessDenied
        n_moved = n_bytes * clock.now_s
        return SimpleNamespace(read_chars=0.4 * n_moved, write_chars=0.6 * n_moved)

    words = ["python", f"scripts/{program}", "--output", "x"]
    return Worker(cmdline=lambda: words, cpu_times=cpu_times, io_counters=io_counters)


def standstill(
    monkeypatch: Patch, folder: Path, list_workers: Callable[[], list[object]]
) -> Standstill:
    def process(pid: int) -> SimpleNamespace:
        assert pid == 42
        return SimpleNamespace(children=lambda *, recursive: list_workers() if recursive else [])

    errors = {"NoSuchProcess": psutil.NoSuchProcess, "AccessDenied": psutil.AccessDenied}
    monkeypatch.setattr(timers, "psutil", SimpleNamespace(Process=process, **errors))
    return Standstill(minutes=0.1, folders=[folder], pid=42)


@pytest.mark.parametrize(
    ("work", "works"),
    [
        ({"cores": 0.03}, True),
        ({"cores": 0.01}, False),
        ({"cores": 0.0, "n_bytes": 10_000.5}, True),
        ({"cores": 0.0, "n_bytes": 10_000}, False),
        # Some containers hide traffic.
        ({"cores": 0.03, "n_bytes": None}, True),
        ({"cores": 0.01, "n_bytes": None}, False),
        ({"cores": 1.0, "program": "monitor_gpu.py"}, False),
    ],
    ids=str,
)
def test_work_is_not_a_standstill(
    work: dict[str, float], works: bool, clock: Clock, tmp_path: Path, monkeypatch: Patch
) -> None:
    workers: list[object] = [worker(clock, **work), worker(clock, 0.0)]  # type: ignore[arg-type]
    ended = ends_after(clock, standstill(monkeypatch, tmp_path, lambda: workers))
    if works:
        assert ended is None
    else:
        # Work until the first check, after half a second, counts.
        why = "no file changed, no CPU was used, nothing was transferred for 0.1 min"
        assert ended is not None and ended[0] <= 6.5 and ended[1] == why


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("e/steps.jsonl", True), ("gpu.jsonl", False), ("monitor.json", False),
        ("guard.json", False), (".guard/ledger.json", False),
    ],
)  # fmt: skip
def test_changing_files_are_not_a_standstill(
    name: str, works: bool, clock: Clock, tmp_path: Path, monkeypatch: Patch
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "dangling").symlink_to("nowhere")
    # A network disk is no more precise.
    (tmp_path / "refused").symlink_to("x" * 300)
    timer = standstill(monkeypatch, tmp_path, lambda: [])
    ended = ends_after(clock, timer, lambda s: path.write_bytes(bytes(int(2 * s))))
    assert (ended is None) == works


def test_processes_that_come_and_go_work(clock: Clock, tmp_path: Path, monkeypatch: Patch) -> None:
    """Usage of current processes counts, even if ended ones took theirs with them."""

    def short() -> list[object]:
        return [worker(Clock(), 0.2 / Clock.now_s)]

    assert ends_after(clock, standstill(monkeypatch, tmp_path, short)) is None
    assert ends_after(clock, Standstill(minutes=0, folders=[], pid=1)) is None
