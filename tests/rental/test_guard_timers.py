"""Timers stop what costs money for nothing, and leave alone what works or cannot be judged."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from guarded import end, record, run, start_trainer, trainer
from support import ROOT

from expertflow.rental.guard import timers
from expertflow.rental.guard.timers import IdleGpu, Notice, Standstill

sys.path.append(str(ROOT / "tests" / "hardware"))

import nvml_stub


class Clock:
    """Time that passes when a test says so."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(timers, "time", Clock())
    return timers.time  # type: ignore[return-value]


def ends_after(
    clock: Clock, timer: IdleGpu | Standstill, look: Callable[[float], object] = float
) -> tuple[float, str] | None:
    """Ask a timer twice a second for 20 s; return when it ended the run, and why."""
    begun_s = clock.now_s
    for half_s in range(40):
        clock.now_s = begun_s + half_s / 2
        look(half_s / 2)
        if (why := timer.poll()) is not None:
            return half_s / 2, why
    return None


def idle_timer(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[], Sequence[float | None]], minutes: float
) -> IdleGpu:
    """Return a timer that reads cards like these, or has no driver where there are none."""

    def device(card: int) -> SimpleNamespace:
        return SimpleNamespace(read_figure=lambda _: read()[card])

    @contextmanager
    def gpus() -> Iterator[SimpleNamespace]:
        devices = tuple(map(device, range(len(read()))))
        yield SimpleNamespace(devices=devices, reason=None if devices else "no driver")

    monkeypatch.setattr(timers, "open_gpus", gpus)
    return IdleGpu(ExitStack(), minutes=minutes, busy_percent=10)


@pytest.mark.parametrize(
    ("cards", "after_s"),
    [
        ((9.9,), 6.0),
        ((9.9, 0.0), 6.0),
        ((10.0,), None),
        ((0.0, 90.0), None),
        # A card without readings may be busy.
        ((0.0, None), None),
        ((), None),
    ],
)
def test_only_cards_that_are_all_idle_end_a_run(
    cards: Sequence[float | None],
    after_s: float | None,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = idle_timer(monkeypatch, lambda: cards, minutes=0.1)
    told = f"on: {len(cards)} cards, 0.1 min below 10 %" if cards else "off: no driver"
    assert timer.state == told
    found = after_s and (after_s, "no card was 10 % busy for 0.1 min")
    assert ends_after(clock, timer) == found


def test_idle_time_counts_from_the_last_work(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    read_s: list[float] = []

    def read() -> list[float]:
        read_s.append(clock.now_s - 1000)
        return [90.0 if clock.now_s < 1003 else 0.0]

    ended = ends_after(clock, idle_timer(monkeypatch, read, minutes=0.1))
    # Cards are read every two seconds: they were last seen busy after two.
    assert ended is not None and ended[0] == 8.0
    assert read_s[1:] == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_no_minutes_no_timer(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = idle_timer(monkeypatch, lambda: [0.0], minutes=0)
    assert timer.state == "off: --idle-minutes 0"
    assert ends_after(clock, timer) is None
    assert ends_after(clock, Standstill(minutes=0, folders=[], pid=1)) is None


def test_a_card_that_stops_telling_is_not_judged(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    timer = idle_timer(monkeypatch, lambda: [0.0 if clock.now_s < 1003 else None], minutes=0.1)
    assert ends_after(clock, timer) is None
    assert timer.state == "off: the cards stopped telling how busy they are"
    assert caplog.text.count("stopped telling") == 1


def test_a_notice_is_asked_for_every_second_and_given_five(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SimpleNamespace] = []
    killed: list[SimpleNamespace] = []

    def ask(command: str, *, stdout: int, stderr: int, **options: bool) -> SimpleNamespace:
        assert command == "ask" and stdout == stderr == subprocess.DEVNULL
        assert options == {"shell": True, "start_new_session": True}
        process = SimpleNamespace(code=None, poll=lambda: process.code)
        asked.append(process)
        return process

    def n_asked_at(now_s: float) -> int:
        clock.now_s = 1000 + now_s
        assert notice.poll() is None
        return len(asked)

    monkeypatch.setattr(
        timers, "subprocess", SimpleNamespace(Popen=ask, DEVNULL=subprocess.DEVNULL)
    )
    monkeypatch.setattr(timers, "kill_group", killed.append)
    notice = Notice("ask")
    assert n_asked_at(0) == n_asked_at(0.1) == 1
    asked[0].code = 1
    assert [n_asked_at(at_s) for at_s in (0.2, 0.9, 1.0)] == [1, 1, 2]
    assert n_asked_at(6.0) == 2 and not killed
    assert n_asked_at(6.1) == 2 and killed == asked[1:]
    assert n_asked_at(6.1) == 3
    asked[2].code = 0
    assert notice.poll() == "the notice command said so"
    assert Notice(None).poll() is None and len(asked) == 3


class Worker:
    """A process of the command, which uses so much of a core and moves so many bytes a second."""

    def __init__(
        self, clock: Clock, cores: float, n_bytes: int | None = 0, program: str = "train.py"
    ) -> None:
        self.clock, self.cores, self.n_bytes, self.program = clock, cores, n_bytes, program

    def cmdline(self) -> list[str]:
        return ["python", f"scripts/{self.program}", "--output", "x"]

    def cpu_times(self) -> SimpleNamespace:
        half_s = self.cores * self.clock.now_s / 2
        return SimpleNamespace(user=half_s, system=half_s)

    def io_counters(self) -> SimpleNamespace:
        if self.n_bytes is None:
            raise psutil.AccessDenied
        n_moved = self.n_bytes * self.clock.now_s
        return SimpleNamespace(read_chars=0.4 * n_moved, write_chars=0.6 * n_moved)


def standstill(
    monkeypatch: pytest.MonkeyPatch, folder: Path, list_workers: Callable[[], list[Worker]]
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
        ({"cores": 0.0, "n_bytes": 11_000}, True),
        ({"cores": 0.0, "n_bytes": 9_000}, False),
        # Some containers hide traffic.
        ({"cores": 0.03, "n_bytes": None}, True),
        ({"cores": 0.01, "n_bytes": None}, False),
        ({"cores": 1.0, "program": "monitor_gpu.py"}, False),
    ],
    ids=str,
)
def test_work_is_no_standstill(
    work: dict[str, float], works: bool, clock: Clock, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    workers = [Worker(clock, **work), Worker(clock, 0.0)]  # type: ignore[arg-type]
    ended = ends_after(clock, standstill(monkeypatch, tmp_path, lambda: workers))
    if works:
        assert ended is None
    else:
        # What was done until the first look, of half a second, counts as work.
        why = "no file changed, no processor was used, nothing was moved for 0.1 min"
        assert ended is not None and ended[0] <= 6.5 and ended[1] == why


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("e/steps.jsonl", True),
        ("gpu.jsonl", False),
        ("monitor.json", False),
        ("guard.json", False),
        (".guard/ledger.json", False),
    ],
)
def test_files_that_change_are_no_standstill(
    name: str, works: bool, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = standstill(monkeypatch, tmp_path, lambda: [])
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "dangling").symlink_to("nowhere")
    path.write_text("")

    def write(s: float) -> None:
        with path.open("a") as stream:
            stream.write("x")

    ended = ends_after(clock, timer, write)
    assert (ended is None) == works


def test_processes_that_come_and_go_work(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the processes of now have used by now counts, even if others took theirs along."""

    class Short(Worker):
        def cpu_times(self) -> SimpleNamespace:
            return SimpleNamespace(user=0.2, system=0.0)

    timer = standstill(monkeypatch, tmp_path, lambda: [Short(clock, 0.0)])
    assert ends_after(clock, timer) is None


def test_idle_cards_end_a_run(tmp_path: Path) -> None:
    library = nvml_stub.build(tmp_path)
    env = nvml_stub.environment(library, nvml_stub.write(tmp_path, utilization=90))
    options = ("--idle-minutes", "0.01")
    guard = start_trainer(tmp_path, *options, command=trainer(tmp_path), env=env)
    nvml_stub.write(tmp_path, utilization=0)
    code, out = end(guard)
    assert code == 81, out
    assert (tmp_path / "saved.txt").is_file()
    found = record(tmp_path)
    assert found["outcome"] == "idle" and found["idle_timer"].startswith("on: 1 cards")


def test_a_standstill_ends_a_run(tmp_path: Path) -> None:
    code, out = run(tmp_path, "--stalled-minutes", "0.01", command=["sleep", "3600"])
    assert code == 82, out
    assert record(tmp_path)["outcome"] == "stalled"
