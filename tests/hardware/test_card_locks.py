"""Concurrent jobs take different cards, even after an exec; a scheduler's assignment is kept."""

import importlib
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvml_stub
import pytest
from msgspec.structs import replace
from support import write_tiny_run

from expertflow.core.records import read_record, write_record
from expertflow.hardware import card_locks
from expertflow.hardware.records import GpuFacts
from expertflow.plan.records import TrainPlan

FOUR = {"count": 4, **{f"{i}__uuid": f"GPU-{name}" for i, name in enumerate("abcd")}}
# The shell that replaces it prints what the trainer's processes would see.
JOB = """
import os, sys
from expertflow.hardware.card_locks import lock_cards
lock_cards(int(sys.argv[1]))
os.execvp("sh", ["sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-all}; read until_told"])
"""


class Jobs:
    def __init__(self, library: Path, folder: Path) -> None:
        self.library, self.folder = library, folder
        self.running: list[subprocess.Popen[str]] = []

    def start(self, n: int, scenario: dict[str, Any] = FOUR, **settings: str) -> str:
        """Start a job that takes ``n`` cards and return those it sees."""
        path = nvml_stub.write(self.folder, **scenario)
        places = {"TMPDIR": str(self.folder), **settings}
        env = nvml_stub.environment(self.library, path, **places)
        with (self.folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", JOB, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env=env,
            )  # fmt: skip
        self.running.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def end(self, i: int) -> None:
        self.running.pop(i).communicate("\n")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def jobs(library: Path, tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(library, tmp_path)
    yield made
    while made.running:
        made.end(0)


def test_concurrent_jobs_take_different_cards(jobs: Jobs) -> None:
    assert [jobs.start(n) for n in (1, 2)] == ["GPU-a", "GPU-b,GPU-c"]
    jobs.end(0)
    assert jobs.start(1) == "GPU-a"
    assert (jobs.folder / "log").read_text() == ""
    # The remaining ones are shared, and no job waits.
    assert jobs.start(2) == "GPU-d,GPU-a"
    assert "1 of 2 cards are free" in (jobs.folder / "log").read_text()
    assert jobs.start(1) == "GPU-a"


def test_a_job_chooses_among_its_assigned_cards(jobs: Jobs) -> None:
    assert jobs.start(1, CUDA_VISIBLE_DEVICES="2,1") == "GPU-c"
    assert jobs.start(1, CUDA_VISIBLE_DEVICES="2,1") == "GPU-b"
    # All are needed: they stay as assigned, and are locked.
    assert jobs.start(2, CUDA_VISIBLE_DEVICES="3,0") == "3,0"
    assert jobs.start(1) == "GPU-a" and "0 of 1" in (jobs.folder / "log").read_text()


def test_cards_in_use_come_last(jobs: Jobs) -> None:
    held = {**FOUR, "0__memory_used": 60 << 30, "1__memory_used": 1 << 29}
    assert [jobs.start(n, held) for n in (1, 2, 1)] == ["GPU-b", "GPU-c,GPU-d", "GPU-a"]


def test_a_job_keeps_to_cards_of_one_kind(jobs: Jobs) -> None:
    mixed = {**FOUR, "1__name": "SIMULATED L4", "3__uuid": None, "3__fail__uuid": 3}
    assert [jobs.start(1, mixed) for _ in range(2)] == ["GPU-a", "GPU-c"]
    # Too few of one kind, or a partition of a card: as without locks.
    assert jobs.start(3, mixed) == jobs.start(1, {**FOUR, "mig": 1}) == "all"


def test_a_launchers_cards_are_left_alone(jobs: Jobs) -> None:
    assert jobs.start(2, RANK="0") == jobs.start(2, SLURM_JOB_ID="7") == "all"
    assert jobs.start(1) == "GPU-a"


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.with_name("elsewhere"))]
)
def test_a_lock_that_is_no_file_stops_no_job(jobs: Jobs, make: Callable[[Path], None]) -> None:
    make(jobs.folder / "expertflow-GPU-a.lock")
    assert jobs.start(1) == "GPU-a"
    assert not (jobs.folder / "elsewhere").exists()
    assert ("cannot be locked" in (jobs.folder / "log").read_text()) == (make is not os.mkfifo)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_users_of_one_machine_respect_each_others_locks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)  # as /tmp is
        path = Path(folder, "card.lock")
        before = os.umask(0o077)
        try:
            assert card_locks._lock(path)
        finally:
            os.umask(before)
        assert _lock_as_nobody(path) == "held"
        card_locks._locks.pop().close()
        assert _lock_as_nobody(path) == "taken"


def _lock_as_nobody(path: Path) -> str:
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setuid(65534)
            code = 0 if card_locks._lock(path) else 1
        finally:
            os._exit(code)
    return ("taken", "held", "failed")[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


class Locked(Exception):
    pass


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny run whose plan asks for two cards."""
    folder = tmp_path_factory.mktemp("planned")
    write_tiny_run(folder)
    gpu = GpuFacts(name="H100 SXM", source="test")
    path = folder / "plan.json"
    write_record(path, replace(read_record(TrainPlan, path), gpu=gpu, world_size=2))
    return path


def test_every_job_on_a_card_locks_as_many_as_it_uses(
    planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock_cards(number: int) -> None:
        raise Locked(number)

    results = planned.parent
    places = ["--results", str(results), "--output", str(results / "try" / "training.json")]
    # Answering gets the plan, other jobs its path.
    plans = {"generate_answers": read_record(TrainPlan, planned)}
    asked = SimpleNamespace(hardware="auto", world_size=2)
    for script, n in (
        ("train_expert --world-size 3", 3), ("train_expert", 2), ("calibrate_expert", 2),
        ("tune_expert", 1), ("ablate_variant", 1), ("generate_answers", 1),
    ):  # fmt: skip
        name, *changes = script.split()
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "lock_cards", lock_cards)
        monkeypatch.setattr(sys, "argv", [name, *places, *changes])
        job = SimpleNamespace(spec=asked, plan=plans.get(name, planned), model=None)
        given = dict.fromkeys(inspect.signature(module.main).parameters, job)
        with pytest.raises(Locked, match=str(n)):
            module.main(**given)
