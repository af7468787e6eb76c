"""Timed steps: trials in separate processes, variants against the plan, calibrations."""

import contextlib
import json
import logging
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import support
import torch
from msgspec.structs import replace

from expertflow.core.errors import HardwareError, Interrupted, TrainingError
from expertflow.core.progress import break_silence
from expertflow.core.records import read_record, to_json
from expertflow.hardware import gpu_table
from expertflow.plan.records import Calibration, TrainPlan
from expertflow.studies import ablate_variant as study
from expertflow.studies import calibrate as calibration
from expertflow.studies import plan_expert, subprocess_runner
from expertflow.studies.ablate_variant import ablate_variant
from expertflow.studies.calibrate import shorten_plan, step_levels, take_times
from expertflow.studies.plan_expert import CalibrationJob
from expertflow.studies.records import Variant, VariantJob, VariantRecord, VariantSpec
from expertflow.studies.subprocess_runner import TrialRunner
from expertflow.tokens.records import PackingRecord
from expertflow.train import loop
from expertflow.train.records import EvalPoint, SavePoint, TrialResult
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


def test_a_trial_counts_its_timed_steps_and_leaves_nothing(trial: Trial) -> None:
    result = run(trial)
    assert result.outcome == "measured" and result.problem is None
    assert result.n_timed_steps == len(result.steps_s) == 5 and len(result.losses) == 7
    assert min(result.steps_s) > 0 and sum(result.steps_s) <= result.timed_s
    places = 5 * 4 * 64
    assert result.n_tokens + result.n_padding_tokens == places
    assert 0 < result.n_target_tokens < result.n_tokens
    assert result.tokens_per_s == pytest.approx(result.n_tokens / result.timed_s)
    assert result.device == "cpu" and result.peak_memory_bytes is None
    assert result.startup_s > 0 and result.save_s is None
    assert all(map(math.isfinite, result.losses)) and result.activated
    assert not trial.scratch.exists()
    longer = run(trial, n_timed_steps=6, with_save=True)
    assert longer.losses[:7] == result.losses and len(longer.losses) == 8
    assert longer.save_s is not None and longer.save_s > 0


def test_a_trial_that_hangs_is_killed(trial: Trial) -> None:
    before = set(multiprocessing.active_children())
    result = TrialRunner(limit_s=0.1).run(replace(trial, n_timed_steps=10**6))
    assert result == TrialResult(outcome="failed", problem="no result after 0.1 s")
    assert set(multiprocessing.active_children()) <= before


def answer_and_hang(_: object, answer: Any) -> None:
    answer.send(TrialResult(outcome="measured"))
    # Like a worker or a driver that does not exit.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


def test_a_trial_that_hangs_after_its_answer_is_killed(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess_runner, "_run_child", answer_and_hang)
    monkeypatch.setattr(subprocess_runner, "PATIENCE_S", 0.2)
    assert run(trial).outcome == "measured" and not multiprocessing.active_children()


# Once a process has queried CUDA, torch disallows it in every process forked from it.
WARM = """
import sys
assert {"torch", "expertflow.train.trial"} <= set(sys.modules), "not imported yet"
assert "bitsandbytes" not in sys.modules
import torch
assert torch.cuda._nvml_based_avail() and not torch.cuda.is_initialized()
"""


def test_trials_are_forked_from_a_process_that_imported_torch_without_using_cuda() -> None:
    TrialRunner()
    process: Any = multiprocessing.get_context("forkserver").Process(target=exec, args=(WARM,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_an_impossible_trial_is_a_one_line_error(trial: Trial, plan: TrainPlan) -> None:
    with pytest.raises(TrainingError, match="varlen"):
        run(trial, plan=replace(plan, attention="varlen"))


def test_a_trial_ends_early(trial: Trial, plan: TrainPlan) -> None:
    for changes, outcome, n_timed_steps, problem in (
        ({"n_timed_steps": 10_000, "max_timed_s": 0.2}, "measured", range(1, 10_000), ""),
        ({"n_timed_steps": 50, "least_tokens_per_s": 1e12}, "given up", [3], "below 1,000,0"),
        ({"plan": replace(plan, max_loss=0.001)}, "failed", [0], "diverged"),
    ):
        result = run(trial, **changes)
        assert result.outcome == outcome and result.n_timed_steps in n_timed_steps
        assert problem in (result.problem or "")
        assert result.timed_s >= 0.2 or outcome != "measured"


def test_out_of_memory_is_a_result(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "on_device", full)
    assert run_trial(trial) == TrialResult(outcome="out of memory", problem="CUDA out of memory")
    assert not trial.scratch.exists()


def killed(number: int, *_: object) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), number)


def test_a_killed_trial_is_a_result(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, outcome, message in (
        (signal.SIGKILL, "out of memory", "most likely the host ran out of memory"),
        (signal.SIGSEGV, "failed", f"the process exited with code -{signal.SIGSEGV:d}"),
    ):
        monkeypatch.setattr(subprocess_runner, "_run_child", partial(killed, int(number)))
        result = run(trial)
        assert result.outcome == outcome and (result.problem or "").endswith(message)


def test_a_hangup_that_is_ignored_interrupts_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with subprocess_runner.interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(Interrupted), subprocess_runner.interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


STUBBORN = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace

# They would import torch, for seconds, in both processes.
stub = SimpleNamespace(RANK="RANK", Trial=object, TrialResult=object, run_trial=None)
sys.modules |= {f"expertflow.train.{name}": stub for name in ("processes", "records", "trial")}
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
    script, message = tmp_path / "run.py", tmp_path / "message"
    script.write_text(STUBBORN)
    # Into a file, as a remaining child would keep a pipe open.
    with message.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)], stderr=stream,
            env={**os.environ, "PYTHONPATH": str(support.SCRIPTS)},
        )  # fmt: skip
    for name in ("pid", "told"):
        support.wait_for((tmp_path / name).exists, during=process)
        process.send_signal(signal.SIGTERM)
    process.wait(timeout=support.PATIENCE_S)
    child = int((tmp_path / "pid").read_text())
    try:
        assert "Interrupted: signal 15" in message.read_text()
        assert not support.is_running(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def spec_of(n_timed_steps: int = 4, max_timed_s: float = 20.0, **changes: Any) -> VariantSpec:
    settings: dict[str, Any] = {"name": "v", "label": "", "rows": "packed", "training": {}}
    return VariantSpec(
        variant=Variant(**{**settings, **changes}), n_repeats=3, n_warmup_steps=1,
        n_timed_steps=n_timed_steps, max_timed_s=max_timed_s,
    )  # fmt: skip


def measured(folder: Path, scratch: Path, **changes: Any) -> VariantRecord:
    job = VariantJob(
        spec=spec_of(**changes), plan=folder / "plan.json", model=folder / "model.json",
        packing=read_record(PackingRecord, folder / "packing.json"), rows=folder / "packed",
        scratch=scratch / "scratch",
    )  # fmt: skip
    record = ablate_variant(job)
    assert not (scratch / "scratch").exists()
    return record


def test_variants_are_timed_against_the_plan(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with break_silence(every_s=0.01):
        loose = measured(tiny, tmp_path, rows="unpacked")
    assert "pair 1 of 3, " in caplog.text and "pair 3 of 3, " in caplog.text
    assert loose.outcome == "measured" and loose.is_sane
    assert len(loose.timings) == len(loose.plan_timings) == 3
    # The same documents in as many steps have nearly as many tokens; padding differs.
    own, plain = loose.timings[0], loose.plan_timings[0]
    assert own.n_tokens == pytest.approx(plain.n_tokens, rel=0.25)
    assert loose.ratio is not None and loose.ratio.low < loose.ratio.value < loose.ratio.high
    assert own.device == "cpu" and own.activated and loose.versions["torch"]
    saves = measured(tiny, tmp_path, metric="hours", saves=0.5)
    assert saves.ratio is not None and saves.ratio.value > 1
    assert saves.plan_timings[0].save_s and "hours computed from" in (saves.reason or "")
    # Flex attention cannot train on a CPU; only the trainer checks that.
    flex = measured(tiny, tmp_path, training={"attention": "flex"})
    assert flex.outcome == "not measurable" and "flex" in (flex.reason or "")
    assert flex.ratio is None and not flex.plan_timings


def test_a_plan_that_fails_is_not_run_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def fail(trial: Trial) -> TrialResult:
        runs.append(trial)
        return TrialResult(outcome="out of memory", problem="too large")

    monkeypatch.setattr(study, "TrialRunner", lambda **_: SimpleNamespace(run=fail))
    found = measured(tiny, tmp_path, metric="hours", saves=0.5)
    assert (found.outcome, found.reason) == ("out of memory", "the plan itself: too large")
    assert len(runs) == 1


def test_a_signal_stops_it_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    spec = spec_of(rows="unpacked", n_timed_steps=10**6, max_timed_s=1e6)
    scratch, output = tmp_path / "scratch", tmp_path / "v.json"
    inputs = support.tiny_inputs(tiny, "plan", "packing", "model")
    words = ["--spec", json.dumps(to_json(spec)), *inputs, "--scratch", scratch, "--output", output]
    process = subprocess.Popen(
        [sys.executable, support.SCRIPTS / "ablate_variant.py", *map(str, words)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    support.wait_for((scratch / "trial").exists, during=process)
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate(timeout=support.PATIENCE_S)
    assert process.returncode == 143 and "signal 15; this variant starts over" in message
    assert not scratch.exists() and not output.exists()


def test_two_processes_are_timed_for_30_steps_and_the_plan_uses_it(
    tiny: Path, tmp_path: Path
) -> None:
    # Leftovers of a killed one do no harm.
    (tmp_path / ".calibration" / "state").mkdir(parents=True)
    (tmp_path / ".calibration" / "plan.json").write_text("half a pl")
    settings: Any = {"method": "lora", "lora": support.LORA, "max_steps": 60, "world_size": 2}
    spec = json.dumps(to_json(support.plan_spec(**settings)))
    words = ["--expert", "tiny", "--spec", spec, *support.tiny_inputs(tiny, "packing", "model")]
    output = tmp_path / "calibration.json"
    words += ["--scratch", tmp_path / ".calibration", "--output", output]
    done = support.run_script("calibrate_expert", *words)
    assert done.returncode == 0, done.stderr
    # It leaves nothing else.
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {output.name, f".{output.name}.fingerprint"}
    made = read_record(Calibration, output)
    assert (made.n_timed_steps, made.n_timings) == (30, 30)
    assert 0 < made.step_s_low <= made.step_s <= made.step_s_high
    assert made.save_s > 0 and made.eval_s > 0 and made.startup_s > 0
    assert made.key.startswith("cpu; 2 x ddp; qwen3 of ")
    inputs = plan_expert.PlanInputs(
        expert="tiny", spec=support.plan_spec(**settings, price_usd_per_hour=1.0),
        packing=tiny / "packing.json", model=tiny / "model.json",
    )  # fmt: skip
    planned = plan_expert.plan_expert(inputs, calibration=output)
    assert planned.cost.calibrated
    assert planned.cost.step_hours == pytest.approx(60 * made.step_s / 3600)
    assert planned.cost.predicted_usd == pytest.approx(planned.cost.predicted_hours)


def test_a_plan_is_shortened_and_short_epochs_timed_completely(base: TrainPlan) -> None:
    plan = replace(
        base, n_steps=200, n_warmup_steps=60, n_decay_steps=140, patience=2,
        load_best_model_at_end=True, save_steps=7, eval_steps=9,
    )  # fmt: skip
    short, n_warmup = shorten_plan(plan)
    assert (short.n_steps, n_warmup) == (40, 10)
    assert short.n_warmup_steps < short.n_steps
    assert short.n_warmup_steps + short.n_decay_steps <= short.n_steps
    assert short.save_steps == short.eval_steps == 40
    assert short.patience is None and not short.load_best_model_at_end
    for n_steps in range(1, 41):
        short, n_warmup = shorten_plan(replace(plan, n_steps=n_steps))
        assert n_warmup % short.logging_steps == 0
    uneven = np.array([2.0, 1.0] * 8)
    assert step_levels(uneven, per_epoch=2).tolist() == [1.5] * 8
    assert step_levels(uneven, per_epoch=5) is uneven
    assert step_levels(np.array([9.0, *uneven]), per_epoch=2).tolist() == [1.5] * 8


def test_the_parts_of_a_short_run_add_up_to_it(base: TrainPlan) -> None:
    """The remainder happens once: here 4 s of startup and 1 s extra for step 1."""
    seconds = np.array([2.0, *[1.0] * 7])
    record: Any = SimpleNamespace(
        time=SimpleNamespace(wall_s=3.0 + 4.0 + seconds.sum() + 2 * 0.5 + 0.25),
        save_points=(SavePoint(step=8, elapsed_s=13.0, save_s=0.25),),
        eval_points=(EvalPoint(step=8, loss=1.0, n_target_tokens=1, eval_s=0.5),) * 2,
    )
    steps: list[Any] = [
        SimpleNamespace(step_s=s, elapsed_s=5.0 + end, n_tokens=100)
        for s, end in zip(seconds, np.cumsum(seconds), strict=True)
    ]

    def timed(n_window_steps: int, steps: list[Any] = steps, **changes: int) -> Calibration:
        return take_times(
            replace(base, n_steps=8, **changes), record, steps, n_warmup=2, planning_s=3.0,
            key="k", n_window_steps=n_window_steps,
        )  # fmt: skip

    made = timed(1)
    assert made.n_timings == 6
    # On a card, every five steps share a time.
    assert timed(5).n_timings == timed(5, n_steps_per_epoch=1).n_timings == 2
    assert (made.step_s, made.step_s_low, made.step_s_high) == (1.0, 1.0, 1.0)
    assert (made.eval_s, made.save_s) == (0.5, 0.25)
    assert made.startup_s == pytest.approx(5.0)


def test_a_calibration_on_another_card_than_planned_is_rejected(
    tiny: Path, tmp_path: Path, base: TrainPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"name": "H100 SXM", "driver_names": ["NVIDIA H100 80GB HBM3"], "source": "a test"}
    plan = replace(base, gpu=gpu_table.gpu_from_row(row))
    monkeypatch.setattr(calibration, "plan_expert", lambda *_, **__: plan)
    job = CalibrationJob(
        expert="tiny", spec=support.plan_spec(), packing=tiny / "packing.json", code="c",
        model=tiny / "model.json", rows=tiny / "packed", scratch=tmp_path / "s",
    )  # fmt: skip
    seen = {"name": "NVIDIA GeForce RTX 2060"}
    monkeypatch.setattr(plan_expert, "probe_machine", lambda: {"gpus": [seen]})
    with pytest.raises(HardwareError, match=r"for H100 SXM, but this machine has NVIDIA GeForce"):
        calibration.calibrate(job)
    seen["name"] = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(calibration, "run_job", lambda _: False)
    assert calibration.calibrate(job) is None
