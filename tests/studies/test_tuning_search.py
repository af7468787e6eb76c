"""Tuning on made-up speeds: what is found and skipped, the cache, best against default."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import LORA, plan_spec

from expertflow.core.errors import ConfigError, TrainingError
from expertflow.core.records import write_record
from expertflow.hardware import probe
from expertflow.plan.records import PlanSpec
from expertflow.plan.tuned import TunedSettings, TuningRecord
from expertflow.studies.plan_expert import TuneJob, plan_expert
from expertflow.studies.search import Search
from expertflow.studies.tune import tune
from expertflow.train.records import TrialResult
from expertflow.train.trial import Trial

DEFAULT = TunedSettings(
    batch_size=4, gradient_accumulation_steps=4, gradient_checkpointing=False, attention="packed",
    torch_compile=True, n_threads=None, loader="thread", dataloader_num_workers=0,
)  # fmt: skip
ALL = frozenset(TunedSettings.__struct_fields__)
GB = 10**9


def with_rows(n: int, **changes: Any) -> TunedSettings:
    return replace(DEFAULT, batch_size=n, gradient_accumulation_steps=16 // n, **changes)


class Card:
    """A card with made-up speed and memory; every trial takes ten seconds of its clock."""

    def __init__(self, speed: Callable[[TunedSettings], float], **space: Any) -> None:
        self.now_s, self.speed = 0.0, speed
        # What ran, each with the lowest interesting speed.
        self.ran = dict[TunedSettings, float | None]()
        settings: dict[str, Any] = {
            "default": DEFAULT, "free": ALL, "on_card": True, "usable_bytes": 80 * GB,
            "may_compile": True,
        }  # fmt: skip
        self.space = {**settings, **space}

    def run(self, choice: TunedSettings, least: float | None) -> TrialResult:
        self.now_s += 10.0
        self.ran[choice] = least
        speed = self.speed(choice)
        is_slow = least is not None and speed < least
        return TrialResult(
            outcome="given up" if is_slow else "measured", n_timed_steps=5, timed_s=2.0,
            n_tokens=round(speed * 2.0),
        )  # fmt: skip

    def search(self, max_s: float = 1000.0, per_row: int = 5 * GB, **more: Any) -> Search:
        def predict(choice: TunedSettings) -> int:
            share = 4 if choice.gradient_checkpointing else 1
            return choice.batch_size * per_row // share

        search = Search(
            **self.space, run=self.run, predict=predict, clock=lambda: self.now_s,
            max_s=max_s, **more,
        )  # fmt: skip
        search.explore()
        return search


def speed(choice: TunedSettings) -> float:
    """More rows are faster; recomputation and masks cost; compilation pays."""
    rate = 1000.0 * choice.batch_size / (choice.batch_size + 1)
    rate *= 0.7 if choice.gradient_checkpointing else 1.0
    rate *= {"packed": 1.0, "flex": 0.8, "sdpa": 0.5}[choice.attention]
    return rate * (1.5 if choice.torch_compile else 1.0)


def test_the_best_is_found_and_every_choice_keeps_the_global_batch() -> None:
    card = Card(speed)
    search = card.search()
    assert search.best() == with_rows(16)
    assert next(iter(card.ran)) == DEFAULT
    assert {t.batch_size * t.gradient_accumulation_steps for t in search.trials} == {16}
    # Compilation is slow, so only the default and the best without it are compiled.
    assert sum(choice.torch_compile for choice in card.ran) == 2
    # Dominated rows are skipped, and slow choices abandoned.
    rows = {n: search.trials[with_rows(n, torch_compile=False)] for n in (8, 2)}
    assert rows[8].outcome == "measured" and rows[2].outcome == "left out"
    assert rows[2].reason == "dominated: 8 rows were already slower"
    masked = next(t for c, t in search.trials.items() if c.attention == "sdpa")
    assert masked.outcome == "given up"
    fastest = 1000.0 * 16 / 17
    assert card.ran[masked.settings] == pytest.approx(0.9 * fastest, rel=1e-3)


def test_settings_predicted_not_to_fit_are_not_run() -> None:
    card, too_large = Card(speed), with_rows(16, torch_compile=False)
    search = card.search(per_row=9 * GB)
    assert too_large not in card.ran
    trial = search.trials[too_large]
    assert trial.outcome == "left out" and trial.predicted_peak_bytes == 144 * GB
    assert trial.reason == "memory: predicted 134.1 GiB, usable 74.5"
    # Recomputation is tried only with rows that do not fit without it.
    again = [choice.batch_size for choice in card.ran if choice.gradient_checkpointing]
    assert again == [16]
    assert search.best() == with_rows(8)


def test_ties_go_to_the_default_and_manifest_settings_stay() -> None:
    assert Card(lambda c: 1000.0 + c.batch_size).search().best() == DEFAULT

    def but_the_default(choice: TunedSettings) -> float:
        return 500.0 if choice == DEFAULT else 1000.0 + choice.batch_size

    best = Card(but_the_default).search().best()
    assert best is not None and not best.torch_compile and best.gradient_accumulation_steps == 1
    free = ALL - {"batch_size", "gradient_accumulation_steps", "attention"}
    card = Card(speed, free=free)
    assert card.search().best() == DEFAULT
    assert {choice.batch_size for choice in card.ran} == {4}


def test_a_cpu_tunes_threads_and_rows() -> None:
    default = replace(DEFAULT, torch_compile=False)

    def on_cpu(choice: TunedSettings) -> float:
        # Few rows keep one thread busy, many rows four.
        return 100.0 * min(choice.n_threads or 2, choice.batch_size / 2) + (
            10.0 * (choice.n_threads == 4)
        )

    card = Card(
        on_cpu, default=default, on_card=False, usable_bytes=None, may_compile=False,
        n_threads=(1, 2, 4),
    )  # fmt: skip
    search = card.search()
    best = search.best()
    assert best is not None and (best.n_threads, best.batch_size) == (4, 16)
    assert not any(c.gradient_checkpointing or c.torch_compile for c in card.ran)


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


def test_best_and_default_alternate_at_the_end(job: Job) -> None:
    machine = Machine()
    made = machine.tune(job())
    assert made.best is not None and made.best.batch_size == 16
    assert made.default.batch_size == 8 and made.default.gradient_accumulation_steps == 2
    rows = [trial.plan.batch_size for trial in machine.ran[-6:]]
    assert rows == [8, 16, 16, 8, 8, 16]
    assert made.gain == pytest.approx(2600 / 1800) and made.gain_low == pytest.approx(made.gain)


def test_without_time_for_pairs_the_default_stays(job: Job) -> None:
    machine = Machine()
    made = machine.tune(job(max_seconds=60.0))
    n_trials = sum(trial.outcome in ("measured", "given up") for trial in made.trials)
    assert len(machine.ran) == n_trials + 2 * 2, "two pairs, and no time for a third"
    assert made.best == made.default and made.gain is None
    fastest = max(made.trials, key=lambda trial: trial.tokens_per_s or 0.0)
    assert fastest.settings.batch_size == 16
    left_out = [trial.reason for trial in made.trials if trial.outcome == "left out"]
    assert left_out == ["budget: the search had used its 36 s"]


def test_pairs_continue_those_of_a_stopped_search(job: Job, tmp_path: Path) -> None:
    whole, after = Machine(), Machine()
    whole.tune(job(cache=tmp_path / "other"))
    with pytest.raises(KeyboardInterrupt):
        Machine(stops_after=len(whole.ran) - 3).tune(job())
    made = after.tune(job())
    assert [trial.plan.batch_size for trial in after.ran] == [16, 8, 8, 16]
    assert made.best is not None and made.best.batch_size == 16 and made.gain_low


def test_one_of_several_processes_is_timed_and_an_uncertain_gain_is_a_tie(job: Job) -> None:
    machine = Machine()
    made = machine.tune(job(plan_spec(**FREE, world_size=2, parallel="ddp")))
    assert "2 x ddp" in made.key and "16 rows a step" in made.key
    for plan in (trial.plan for trial in machine.ran):
        n_rows = plan.batch_size * plan.gradient_accumulation_steps
        assert (plan.world_size, n_rows, plan.global_batch_sequences) == (1, 8, 8)
    # Each trial is a tenth faster than the last; alternating shows that the machine is the cause.
    made = Machine(drift=1.1, by_rows=0.0).tune(job())
    assert made.best == made.default and made.gain == pytest.approx(1.1 ** (1 / 3), rel=1e-3)
    assert made.gain_low and made.gain_low < 1


def test_trials_are_reused_by_another_expert_of_the_kind(job: Job, tmp_path: Path) -> None:
    made, second = Machine().tune(job()), Machine()
    again = second.tune(job(expert="another"))
    assert second.ran == []
    assert (again.best, again.gain, again.trials) == (made.best, made.gain, made.trials)
    # Not for other code, or another global batch, or if asked again, or if the cache is damaged.
    more = plan_spec(**{**FREE, "gradient_accumulation_steps": 4})
    (kept,) = (tmp_path / "cache").glob("*.json")
    (third := Machine()).tune(job())
    assert third.ran
    kept.write_text("{")
    for other in (job(code="d"), job(more), job()):
        third = Machine()
        third.tune(other)
        assert third.ran


def test_out_of_memory_is_tried_again(job: Job, tmp_path: Path) -> None:
    def full(trial: Trial) -> TrialResult:
        # Like a killed process, which leaves its files behind.
        trial.scratch.mkdir()
        return TrialResult(outcome="out of memory")

    assert tune(job(), full).best is None
    assert not (tmp_path / ".tuning").exists()
    again = Machine().tune(job())
    assert again.best is not None and again.best.batch_size == 16


def test_an_impossible_trial_does_not_end_the_search(job: Job, tmp_path: Path) -> None:
    def broken(trial: Trial) -> TrialResult:
        raise TrainingError("a kernel\nis missing")

    made = tune(job(), broken)
    assert made.best is None and made.gain is None
    assert made.trials[0].outcome == "failed" and made.trials[0].reason == "a kernel is missing"
    write_record(tmp_path / "tuning.json", made)
    plan = plan_expert(job(), tuning=tmp_path / "tuning.json")
    told = {reason.setting: reason.because for reason in plan.reasons}
    assert told["tuned"].startswith("ignored: no trial that agrees")


def test_a_sharded_model_is_not_tuned(job: Job) -> None:
    with pytest.raises(ConfigError, match="cannot hold the whole model; use ddp"):
        Machine().tune(job(plan_spec(**FREE, world_size=2, parallel="fsdp")))
