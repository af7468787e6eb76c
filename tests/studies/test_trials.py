"""A trial: timed steps of a plan in a separate process."""

import contextlib
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support import PATIENCE_S, SCRIPTS, is_running, wait_for

from expertflow.core.errors import TrainingError
from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.studies import subprocess_runner
from expertflow.studies.subprocess_runner import TrialRunner
from expertflow.train import loop
from expertflow.train.records import TrialResult
from expertflow.train.trial import Trial, run_trial

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def plan(tiny: Path) -> TrainPlan:
    return read_record(TrainPlan, tiny / "plan.json")


@pytest.fixture
def trial(tiny: Path, plan: TrainPlan, tmp_path: Path) -> Trial:
    return Trial(
        plan=plan, model=tiny / "model.json", rows=tiny / "packed", scratch=tmp_path / ".trial",
        n_warmup_steps=2, n_timed_steps=5,
    )  # fmt: skip


def run(trial: Trial, **changes: Any) -> TrialResult:
    return TrialRunner().run(replace(trial, **changes))


def test_a_trial_counts_what_its_timed_steps_did_and_leaves_nothing(trial: Trial) -> None:
    result = run(trial)
    assert result.outcome == "measured" and result.problem is None
    assert result.n_timed_steps == len(result.steps_s) == 5 and len(result.losses) == 7
    assert min(result.steps_s) > 0 and sum(result.steps_s) <= result.timed_s
    places = 5 * 4 * 64
    assert result.n_tokens + result.n_padding_tokens == places
    assert 0 < result.n_target_tokens < result.n_tokens
    assert result.tokens_per_s == pytest.approx(result.n_tokens / result.timed_s)
    assert result.device == "cpu" and result.peak_memory_bytes is None
    assert result.startup_s > 0 and result.first_step_s > 0 and result.save_s is None
    assert all(map(math.isfinite, result.losses)) and result.activated
    assert not trial.scratch.exists()
    longer = run(trial, n_timed_steps=6, with_save=True)
    assert longer.losses[:7] == result.losses and len(longer.losses) == 8
    assert longer.save_s is not None and longer.save_s > 0


def test_a_limit_of_seconds_ends_the_timed_part(trial: Trial) -> None:
    result = run(trial, n_timed_steps=10_000, max_timed_s=0.2)
    assert result.outcome == "measured"
    assert result.timed_s >= 0.2 and result.n_timed_steps < 10_000


def test_a_trial_that_hangs_is_ended(trial: Trial) -> None:
    before = set(multiprocessing.active_children())
    result = TrialRunner(limit_s=0.1).run(replace(trial, n_timed_steps=10**6))
    assert result == TrialResult(outcome="failed", problem="no result after 0.1 s")
    assert set(multiprocessing.active_children()) <= before


# Once a process has asked CUDA, torch refuses it to every process that is forked from it.
WARM = """
import sys
assert {"torch", "expertflow.train.trial"} <= set(sys.modules), "not imported yet"
assert "bitsandbytes" not in sys.modules
import torch
assert torch.cuda._nvml_based_avail() and not torch.cuda.is_initialized()
"""


def test_trials_are_forked_from_a_process_that_has_imported_torch_and_asks_no_cuda() -> None:
    TrialRunner()
    process: Any = multiprocessing.get_context("forkserver").Process(target=exec, args=(WARM,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_what_is_too_slow_is_given_up(trial: Trial) -> None:
    result = run(trial, n_timed_steps=50, least_tokens_per_s=1e12)
    assert result.outcome == "given up" and result.n_timed_steps == 3
    assert result.problem and "below 1,000,000,000,000" in result.problem


def test_what_cannot_be_run_is_an_error_of_one_line(trial: Trial, plan: TrainPlan) -> None:
    with pytest.raises(TrainingError, match="varlen"):
        run(trial, plan=replace(plan, attention="varlen"))


def test_a_loss_that_explodes_is_a_result(trial: Trial, plan: TrainPlan) -> None:
    result = run(trial, plan=replace(plan, max_loss=0.001))
    assert result.outcome == "failed" and "diverged" in (result.problem or "")


def test_out_of_memory_is_a_result(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "on_device", full)
    assert run_trial(trial) == TrialResult(outcome="out of memory", problem="CUDA out of memory")
    assert not trial.scratch.exists()


def killed(number: int, *_: object) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "outcome", "said"),
    [
        (signal.SIGKILL, "out of memory", "most likely the host's memory ran out"),
        (signal.SIGSEGV, "failed", f"the process ended with code -{signal.SIGSEGV:d}"),
    ],
)
def test_a_killed_trial_is_a_result(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, number: int, outcome: str, said: str
) -> None:
    monkeypatch.setattr(subprocess_runner, "_run_child", partial(killed, int(number)))
    result = run(trial)
    assert result.outcome == outcome and (result.problem or "").endswith(said)


STUBBORN = """
import os, signal, sys
from pathlib import Path
from expertflow.studies import subprocess_runner

def stubborn(trial, answer):
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: (folder / "told").touch())
    (folder / "pid.part").write_text(str(os.getpid()))
    (folder / "pid.part").rename(folder / "pid")
    while True:
        signal.pause()

if __name__ == "__main__":
    subprocess_runner._run_child = stubborn
    subprocess_runner.PRELOADED = []
    subprocess_runner.PATIENCE_S = 1
    subprocess_runner.TrialRunner().run(None)
"""


def test_a_second_signal_does_not_leave_the_trial_behind(tmp_path: Path) -> None:
    script, said = tmp_path / "run.py", tmp_path / "said"
    script.write_text(STUBBORN)
    # To a file, as a remaining child would keep a pipe open.
    with said.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)], stderr=stream,
            env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
        )  # fmt: skip
    for name in ("pid", "told"):
        wait_for((tmp_path / name).exists, during=process)
        process.send_signal(signal.SIGTERM)
    process.wait(timeout=PATIENCE_S)
    child = int((tmp_path / "pid").read_text())
    try:
        assert "Interrupted: signal 15" in said.read_text()
        assert not is_running(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
