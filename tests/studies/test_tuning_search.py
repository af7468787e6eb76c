"""The search on made-up speeds: what it finds, prunes, gives up and leaves out."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.plan.tuned import TunedSettings
from expertflow.studies.search import Search, Space
from expertflow.train.records import TrialResult

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
        self.fails = dict[TunedSettings, TrialResult]()
        settings: dict[str, Any] = {
            "default": DEFAULT, "free": ALL, "on_card": True, "usable_bytes": 80 * GB,
            "may_compile": True,
        }  # fmt: skip
        self.space = Space(**{**settings, **space})

    def run(self, choice: TunedSettings, least: float | None) -> TrialResult:
        self.now_s += 10.0
        self.ran[choice] = least
        if choice in self.fails:
            return self.fails[choice]
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
            space=self.space, run=self.run, predict=predict, clock=lambda: self.now_s,
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


def test_what_is_predicted_not_to_fit_is_not_run() -> None:
    card, too_large = Card(speed), with_rows(16, torch_compile=False)
    search = card.search(per_row=9 * GB)
    assert too_large not in card.ran
    trial = search.trials[too_large]
    assert trial.outcome == "left out" and trial.predicted_peak_bytes == 144 * GB
    assert trial.reason == "memory: 134.1 GiB are predicted and 74.5 may be used"
    # Recomputation is only tried with rows that do not fit without it.
    again = [choice.batch_size for choice in card.ran if choice.gradient_checkpointing]
    assert again == [16]
    assert search.best() == with_rows(8)


def test_a_trial_that_fails_is_a_result_and_the_search_goes_on() -> None:
    card, largest = Card(speed), with_rows(16, torch_compile=False)
    failed = TrialResult(outcome="out of memory", problem="CUDA out of memory")
    masked = replace(DEFAULT, torch_compile=False, attention="flex")
    card.fails = {largest: failed, masked: TrialResult(outcome="failed")}
    search = card.search()
    found = search.trials[largest]
    assert (found.outcome, found.reason) == (failed.outcome, failed.problem)
    assert search.best() == with_rows(8)


def test_dominated_rows_are_left_out_and_the_slow_are_given_up() -> None:
    card = Card(speed)
    trials = card.search().trials
    rows = {n: trials[with_rows(n, torch_compile=False)] for n in (8, 2)}
    assert rows[8].outcome == "measured" and rows[2].outcome == "left out"
    assert rows[2].reason == "dominated: 8 rows were slower already"
    masked = next(t for c, t in trials.items() if c.attention == "sdpa")
    assert masked.outcome == "given up"
    fastest = 1000.0 * 16 / 17
    assert card.ran[masked.settings] == pytest.approx(0.9 * fastest, rel=1e-3)


def test_no_trial_begins_when_the_time_is_over() -> None:
    card = Card(speed)
    search = card.search(max_s=25.0)
    assert len(card.ran) == 3 and card.now_s == 30
    reasons = {t.reason for t in search.trials.values() if t.outcome == "left out"}
    assert "budget: the 25 s of the search were over" in reasons
    assert search.best() in card.ran


def test_a_tie_goes_to_the_default_and_else_to_the_simpler() -> None:
    assert Card(lambda c: 1000.0 + c.batch_size).search().best() == DEFAULT

    def but_the_default(choice: TunedSettings) -> float:
        return 500.0 if choice == DEFAULT else 1000.0 + choice.batch_size

    best = Card(but_the_default).search().best()
    assert best is not None and not best.torch_compile and best.gradient_accumulation_steps == 1


def test_what_the_manifest_names_is_kept_by_the_best() -> None:
    free = ALL - {"batch_size", "gradient_accumulation_steps", "attention"}
    card = Card(speed, free=free)
    assert card.search().best() == DEFAULT
    # Other splits of the batch are tried last, to inform the user.
    rows = [choice.batch_size for choice in card.ran]
    assert set(rows) > {4} and rows.index(16) > 1


def test_a_cpu_tunes_threads_and_rows() -> None:
    default = replace(DEFAULT, torch_compile=False)
    skipped = (replace(default, torch_compile=True), "not tried on a CPU")

    def on_cpu(choice: TunedSettings) -> float:
        # Few rows keep one thread busy, many rows four.
        return 100.0 * min(choice.n_threads or 2, choice.batch_size / 2) + (
            10.0 * (choice.n_threads == 4)
        )

    card = Card(
        on_cpu, default=default, on_card=False, usable_bytes=None, may_compile=False,
        n_threads=(1, 2, 4), left_out=(skipped,),
    )  # fmt: skip
    search = card.search()
    best = search.best()
    assert best is not None and (best.n_threads, best.batch_size) == (4, 16)
    assert not any(c.gradient_checkpointing or c.torch_compile for c in card.ran)
    assert search.trials[skipped[0]].reason == "not tried on a CPU"
