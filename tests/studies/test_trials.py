"""A trial: timed steps of a plan in a separate process."""

import contextlib
import json
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
from msgspec.structs import replace
from support import PATIENCE_S, SCRIPTS, is_running, wait_for

from expertflow.core.errors import TrainingError
from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.studies import subprocess_runner
from expertflow.studies.subprocess_runner import TrialRunner
from expertflow.train.records import TrialResult
from expertflow.train.trial import Trial, run_trial

pytestmark = pytest.mark.long


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
    longer = TrialRunner().run(trial_of(tiny, n_timed_steps=6, with_save=True))
    assert longer.losses[:7] == result.losses and len(longer.losses) == 8
    assert longer.save_s is not None and longer.save_s > 0


def test_a_limit_of_seconds_ends_the_timed_part(tiny: Path) -> None:
    result = TrialRunner().run(trial_of(tiny, n_timed_steps=10_000, max_timed_s=0.2))
    assert result.outcome == "measured"
    assert result.timed_s >= 0.2 and result.n_timed_steps < 10_000


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
from expertflow.studies import subprocess_runner
from expertflow.studies.subprocess_runner import PRELOADED

for name in PRELOADED:
    __import__(name)
print(json.dumps([asked, "bitsandbytes" in sys.modules]))
"""


def test_the_warm_process_leaves_cuda_to_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Just the name of a package for which transformers asks the card at import.
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
    tiny: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: str, said: str
) -> None:
    monkeypatch.setattr(subprocess_runner, "_run_child", partial(killed, int(number)))
    result = TrialRunner().run(trial_of(tiny))
    assert result.outcome == outcome and (result.problem or "").endswith(said)


SCRIPT = """
import os, signal, sys
from pathlib import Path
from expertflow.studies import subprocess_runner
from expertflow.train.trial import Trial

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
    here = Path()
    trial = Trial(
        plan=None, model=here, rows=here, scratch=here, n_warmup_steps=1, n_timed_steps=1
    )
    subprocess_runner.TrialRunner().run(trial)
"""


def test_a_second_signal_does_not_leave_the_trial_behind(tmp_path: Path) -> None:
    # To a file, as a remaining child would keep a pipe open.
    (tmp_path / "run.py").write_text(SCRIPT)
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "run.py"), str(tmp_path)],
            stderr=said, env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
        )  # fmt: skip
    for name in ("pid", "told"):
        wait_for((tmp_path / name).exists, during=process)
        process.send_signal(signal.SIGTERM)
    process.wait(timeout=PATIENCE_S)
    child = int((tmp_path / "pid").read_text())
    try:
        assert "Interrupted: signal 15" in (tmp_path / "said").read_text()
        assert not is_running(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
