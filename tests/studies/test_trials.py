"""A trial: steps of a plan that are timed in a process of its own."""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import LORA, SCRIPTS, write_tiny_run

from expertflow.core.errors import TrainingError
from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.studies.subprocess_runner import TrialRunner
from expertflow.train.trial import Trial, TrialResult, run_trial


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_run(folder, lora=LORA, n_steps=8)
    return folder


def trial_of(folder: Path, **changes: Any) -> Trial:
    settings: dict[str, Any] = {
        "plan": read_record(TrainPlan, folder / "plan.json"), "model": folder / "model.json",
        "rows": folder / "packed", "scratch": folder / ".trial", "n_warmup_steps": 2,
        "n_timed_steps": 5,
    }  # fmt: skip
    return Trial(**{**settings, **changes})


def test_a_trial_counts_what_its_timed_steps_did_and_leaves_nothing(tiny: Path) -> None:
    result = TrialRunner().run(trial_of(tiny))
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
    assert not (tiny / ".trial").exists()


def test_the_same_steps_have_the_same_losses(tiny: Path) -> None:
    trials = TrialRunner()
    first = trials.run(trial_of(tiny))
    longer = trials.run(trial_of(tiny, n_timed_steps=6, with_save=True))
    assert longer.losses[:7] == first.losses and len(longer.losses) == 8
    assert longer.save_s is not None and longer.save_s > 0


def test_a_trial_may_be_longer_than_its_plan(tiny: Path) -> None:
    assert len(TrialRunner().run(trial_of(tiny, n_timed_steps=20)).losses) == 22


def test_a_limit_of_seconds_ends_the_timed_part(tiny: Path) -> None:
    result = TrialRunner().run(trial_of(tiny, n_timed_steps=10_000, max_timed_s=0.2))
    assert result.outcome == "measured"
    assert result.timed_s >= 0.2 and result.n_timed_steps < 10_000


def test_one_long_step_after_the_first_is_warm_up_enough(tiny: Path) -> None:
    trial = trial_of(tiny, n_warmup_steps=5, n_timed_steps=2, long_step_s=0.0)
    assert len(TrialRunner().run(trial).losses) == 4


def test_a_trial_that_hangs_is_ended(tiny: Path) -> None:
    before = set(multiprocessing.active_children())
    result = TrialRunner(limit_s=0.1).run(trial_of(tiny, n_timed_steps=10**6))
    assert result == TrialResult(outcome="failed", problem="no result after 0.1 s")
    assert set(multiprocessing.active_children()) <= before


ASKED = """
import json, sys
import torch

asked = []

def is_available():
    # Else CUDA is asked, and torch refuses it to every process that is forked afterwards.
    asked.append(torch.cuda._nvml_based_avail())
    return False

torch.cuda.is_available = is_available
from expertflow.studies.subprocess_runner import PRELOADED

for name in PRELOADED:
    __import__(name)
print(json.dumps([asked, "bitsandbytes" in sys.modules]))
"""


def test_the_warm_process_leaves_cuda_to_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the name of a package that transformers asks the card about as it is imported.
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    about = tmp_path / "flash_attn-2.8.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (about / "top_level.txt").write_text("flash_attn\n")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    TrialRunner()
    env = {**os.environ, "PYTHONPATH": f"{SCRIPTS}:{tmp_path}"}
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    asked, starts_cuda = json.loads(done.stdout.splitlines()[-1])
    assert asked and all(asked) and not starts_cuda


def test_what_is_too_slow_is_given_up(tiny: Path) -> None:
    result = TrialRunner().run(trial_of(tiny, n_timed_steps=50, least_tokens_per_s=1e12))
    assert result.outcome == "given up" and result.n_timed_steps == 3
    assert result.problem and "below 1,000,000,000,000" in result.problem


def test_what_cannot_be_run_is_an_error_of_one_line(tiny: Path) -> None:
    plan = replace(read_record(TrainPlan, tiny / "plan.json"), attention="varlen")
    with pytest.raises(TrainingError, match="varlen"):
        TrialRunner().run(trial_of(tiny, plan=plan))


def test_a_loss_that_explodes_is_a_result(tiny: Path) -> None:
    plan = replace(read_record(TrainPlan, tiny / "plan.json"), max_loss=0.001)
    result = TrialRunner().run(trial_of(tiny, plan=plan))
    assert result.outcome == "failed" and "diverged" in (result.problem or "")


def test_out_of_memory_is_a_result(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from expertflow.train import loop

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "on_device", full)
    assert run_trial(trial_of(tiny)) == TrialResult(
        outcome="out of memory", problem="CUDA out of memory"
    )
    assert not (tiny / ".trial").exists()


KILLED = """
import json, os, resource, signal, sys
from pathlib import Path
from expertflow.studies import subprocess_runner
from expertflow.train.trial import Trial

def child(trial, answer):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])

if __name__ == "__main__":
    subprocess_runner._run_child = child
    here = Path()
    trial = Trial(
        plan=None, model=here, rows=here, scratch=here, n_warmup_steps=1, n_timed_steps=1
    )
    result = subprocess_runner.TrialRunner().run(trial)
    print(json.dumps([result.outcome, result.problem]))
"""


def test_a_killed_trial_is_a_result(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    outcomes = {}
    for name in ("SIGKILL", "SIGSEGV"):
        command = [sys.executable, str(script), name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        outcomes[name] = json.loads(done.stdout)
    assert outcomes["SIGKILL"][0] == "out of memory"
    assert outcomes["SIGSEGV"] == ["failed", f"the process ended with code -{signal.SIGSEGV:d}"]


STOPPED = """
import sys
from pathlib import Path
from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.studies.subprocess_runner import TrialRunner
from expertflow.core.errors import Interrupted
from expertflow.train.trial import Trial

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trial = Trial(
        plan=read_record(TrainPlan, folder / "plan.json"), model=folder / "model.json",
        rows=folder / "packed", scratch=folder / ".stopped", n_warmup_steps=1, n_timed_steps=10**6,
    )
    try:
        TrialRunner().run(trial)
    except Interrupted as error:
        sys.exit(f"interrupted: {error}")
"""


def test_a_signal_ends_the_trial_as_well(tiny: Path, tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, str(script), str(tiny)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 300
    while not (tiny / ".stopped").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 1 and "interrupted: signal 15" in said
    assert not (tiny / ".stopped").exists()


STUBBORN = """
import os, signal, sys, time
from pathlib import Path
from expertflow.studies import subprocess_runner
from expertflow.train.trial import Trial

def child(trial, answer):
    folder = Path(sys.argv[1])
    def told(*_):
        (folder / "told").touch()
    signal.signal(signal.SIGTERM, told)
    (folder / "pid.part").write_text(str(os.getpid()))
    (folder / "pid.part").rename(folder / "pid")
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    subprocess_runner._run_child, subprocess_runner.PATIENCE_S = child, 3
    here = Path()
    trial = Trial(
        plan=None, model=here, rows=here, scratch=here, n_warmup_steps=1, n_timed_steps=1
    )
    subprocess_runner.TrialRunner().run(trial)
"""


def test_a_second_signal_does_not_leave_the_trial_behind(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, str(script), str(tmp_path)]
    # To a file: a child that is left behind would hold a pipe open.
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stderr=said, env=environment)
    for name in ("pid", "told"):
        deadline = time.monotonic() + 300
        while not (tmp_path / name).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    process.wait(timeout=180)
    child = int((tmp_path / "pid").read_text())
    try:
        assert "Interrupted: signal 15" in (tmp_path / "said").read_text()
        assert not Path(f"/proc/{child}").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
