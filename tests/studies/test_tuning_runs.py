"""Complete tuning: a real run on a CPU, its cache, and the comparison of best and default."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import LORA, plan_spec, run_script, tiny_inputs

from expertflow.core.errors import ConfigError, TrainingError
from expertflow.core.records import read_record, to_json, write_record
from expertflow.hardware import probe
from expertflow.plan.records import PlanSpec
from expertflow.plan.tuned import TuningRecord
from expertflow.studies.plan_expert import TuneJob, plan_expert
from expertflow.studies.tune import tune
from expertflow.train.records import TrialResult
from expertflow.train.trial import Trial

pytestmark = pytest.mark.long

FREE: dict[str, Any] = {
    "method": "lora", "lora": LORA, "batch_size": None, "gradient_accumulation_steps": None,
    "n_threads": None, "tuned": "tuning.json",
}  # fmt: skip


Job = Callable[..., TuneJob]


@pytest.fixture
def job(tiny: Path, tmp_path: Path) -> Job:
    def made(spec: PlanSpec | None = None, **changes: Any) -> TuneJob:
        settings: dict[str, Any] = {
            "expert": "tiny", "spec": spec or plan_spec(**FREE), "packing": tiny / "packing.json",
            "model": tiny / "model.json", "rows": tiny / "packed", "scratch": tmp_path / ".tuning",
            "cache": tmp_path / "cache", "code": "c",
        }  # fmt: skip
        return TuneJob(**{**settings, **changes})

    return made


class Machine:
    """Runs nothing: speed grows with micro-batch rows, its clock with every trial."""

    def __init__(
        self, *, drift: float = 1.0, by_rows: float = 100.0, stops_after: int | None = None
    ) -> None:
        self.now_s, self.ran, self.drift, self.by_rows = 0.0, list[Trial](), drift, by_rows
        self.stops_after = stops_after

    def __call__(self, trial: Trial) -> TrialResult:
        if len(self.ran) == self.stops_after:
            raise KeyboardInterrupt
        self.now_s += 5.0
        self.ran.append(trial)
        rate = (1000 + self.by_rows * trial.plan.batch_size) * self.drift ** len(self.ran)
        return TrialResult(
            outcome="measured", n_timed_steps=2, n_tokens=round(rate * 2), timed_s=2.0
        )

    def tune(self, job: TuneJob) -> TuningRecord:
        return tune(job, self, clock=lambda: self.now_s)


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "usable_cpus", lambda: 2)


def test_best_and_default_take_turns_at_the_end(job: Job) -> None:
    machine = Machine()
    made = machine.tune(job())
    assert made.best is not None and made.best.batch_size == 16
    assert made.default.batch_size == 8 and made.default.gradient_accumulation_steps == 2
    rows = [trial.plan.batch_size for trial in machine.ran[-6:]]
    assert rows == [8, 16, 16, 8, 8, 16]
    assert made.gain == pytest.approx(2600 / 1800) and made.gain_low == pytest.approx(made.gain)
    assert (made.default_tokens_per_s, made.best_tokens_per_s) == (1800, 2600)
    assert made.search_s == machine.now_s and not made.was_cached
    left = {trial.reason for trial in made.trials if trial.outcome == "left out"}
    assert len(left) == 3 and all(why and "not tried on a CPU" in why for why in left)


def test_without_time_for_pairs_the_default_stays(job: Job) -> None:
    machine = Machine()
    made = machine.tune(job(max_seconds=60.0))
    n_trials = sum(trial.outcome in ("measured", "given up") for trial in made.trials)
    assert len(machine.ran) == n_trials + 2 * 2, "two pairs, and no time for a third"
    assert made.best == made.default and made.gain is None
    fastest = max(made.trials, key=lambda trial: trial.tokens_per_s or 0.0)
    assert fastest.settings.batch_size == 16


def test_pairs_go_on_from_those_of_a_search_that_was_stopped(job: Job, tmp_path: Path) -> None:
    whole, after = Machine(), Machine()
    whole.tune(job(cache=tmp_path / "other"))
    with pytest.raises(KeyboardInterrupt):
        Machine(stops_after=len(whole.ran) - 3).tune(job())
    made = after.tune(job())
    assert [trial.plan.batch_size for trial in after.ran] == [16, 8, 8, 16]
    assert made.best is not None and made.best.batch_size == 16 and made.gain_low


def test_of_several_processes_one_is_timed_with_its_own_rows(job: Job) -> None:
    machine = Machine()
    made = machine.tune(job(plan_spec(**FREE, world_size=2, parallel="ddp")))
    assert "2 x ddp" in made.key and made.global_batch_sequences == 16
    for plan in (trial.plan for trial in machine.ran):
        n_rows = plan.batch_size * plan.gradient_accumulation_steps
        assert (plan.world_size, n_rows, plan.global_batch_sequences) == (1, 8, 8)


def test_a_gain_that_is_not_certain_is_a_tie(job: Job) -> None:
    # Each trial is a tenth slower than the last; alternating shows that the machine is the cause.
    made = Machine(drift=0.9, by_rows=6.0).tune(job())
    assert made.best == made.default and (made.gain, made.gain_low) == (1.0, None)


def test_trials_are_taken_over_by_another_expert_of_the_kind(job: Job, tmp_path: Path) -> None:
    made, second = Machine().tune(job()), Machine()
    again = second.tune(job(expert="another"))
    assert second.ran == [] and again.was_cached
    assert (again.best, again.gain, again.trials) == (made.best, made.gain, made.trials)
    # Not for other code, or another global batch, or where the cache is spoilt.
    more = plan_spec(**{**FREE, "gradient_accumulation_steps": 4})
    (kept,) = (tmp_path / "cache").glob("*.json")
    kept.write_text("{")
    for other in (job(code="d"), job(more), job()):
        assert not Machine().tune(other).was_cached


def test_memory_that_ran_out_is_tried_again(job: Job, tmp_path: Path) -> None:
    def full(trial: Trial) -> TrialResult:
        # Like a killed process, which leaves its files behind.
        trial.scratch.mkdir()
        return TrialResult(outcome="out of memory")

    assert tune(job(), full).best is None
    assert not (tmp_path / ".tuning").exists()
    again = Machine().tune(job())
    assert again.best is not None and again.best.batch_size == 16 and not again.was_cached


def test_what_cannot_be_run_is_no_end(job: Job, tmp_path: Path) -> None:
    def broken(trial: Trial) -> TrialResult:
        raise TrainingError("a kernel\nis missing")

    made = tune(job(), broken)
    assert made.best is None and made.gain is None
    assert made.trials[0].outcome == "failed" and made.trials[0].reason == "a kernel is missing"
    write_record(tmp_path / "tuning.json", made)
    plan = plan_expert(job(), tuning=tmp_path / "tuning.json")
    told = {reason.setting: reason.because for reason in plan.reasons}
    assert told["tuned"].startswith("left out: nothing that was tried")


def test_a_model_that_is_shared_out_is_not_tuned(job: Job) -> None:
    with pytest.raises(ConfigError, match="cannot hold the whole model; use ddp"):
        Machine().tune(job(plan_spec(**FREE, world_size=2, parallel="fsdp")))


def test_a_tiny_run_is_tuned_for_real(job: Job, tiny: Path, tmp_path: Path) -> None:
    words = ["--expert", "tiny", "--spec", json.dumps(to_json(job().spec)), "--max-seconds", "12"]
    words += [*tiny_inputs(tiny, "packing", "model"), "--scratch", tmp_path / ".tuning"]
    words += ["--cache", tmp_path / "cache", "--output", tmp_path / "tuning.json"]
    done = run_script("tune_expert", *words)
    assert done.returncode == 0, done.stderr
    made = read_record(TuningRecord, tmp_path / "tuning.json")
    ran = [trial for trial in made.trials if trial.outcome in ("measured", "given up")]
    assert ran and ran[0].settings == made.default and ran[0].tokens_per_s
    assert made.best is not None and (made.gain is not None or made.best == made.default)
    assert not (tmp_path / ".tuning").exists()
    plan = plan_expert(job(), tuning=tmp_path / "tuning.json")
    assert plan.batch_size == made.best.batch_size
    assert plan.n_threads == made.best.n_threads and plan.may_halve_micro_batch
