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
TRIAL_S = 10.0
GB = 10**9


def measured(tokens_per_s: float, **more: Any) -> TrialResult:
    settings: dict[str, Any] = {"outcome": "measured", "n_timed_steps": 5, "timed_s": 2.0, **more}
    return TrialResult(**settings, n_tokens=round(tokens_per_s * 2.0))


class Card:
    """A card with made-up speed and memory; every trial takes ten seconds of its clock."""

    def __init__(self, speed: Callable[[TunedSettings], float], **space: Any) -> None:
        self.now_s, self.ran = 0.0, list[TunedSettings]()
        self.least = dict[TunedSettings, float | None]()
        self.speed = speed
        self.fails = dict[TunedSettings, TrialResult]()
        settings: dict[str, Any] = {
            "default": DEFAULT, "free": ALL, "on_card": True, "usable_bytes": 80 * GB,
            "may_compile": True,
        }  # fmt: skip
        self.space = Space(**{**settings, **space})

    def run(self, choice: TunedSettings, least: float | None) -> TrialResult:
        self.now_s += TRIAL_S
        self.ran.append(choice)
        self.least[choice] = least
        if choice in self.fails:
            return self.fails[choice]
        speed = self.speed(choice)
        is_slow = least is not None and speed < least
        return measured(speed, outcome="given up" if is_slow else "measured")

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
    assert search.best() == replace(DEFAULT, batch_size=16, gradient_accumulation_steps=1)
    assert card.ran[0] == DEFAULT
    for choice in search.trials:
        assert choice.batch_size * choice.gradient_accumulation_steps == 16
    # Compilation is slow, so only the default and the best without it are compiled.
    assert sum(choice.torch_compile for choice in card.ran) == 2


def test_what_is_predicted_not_to_fit_is_not_run() -> None:
    card = Card(speed)
    search = card.search(per_row=9 * GB)
    too_large = replace(DEFAULT, batch_size=16, gradient_accumulation_steps=1, torch_compile=False)
    assert too_large not in card.ran
    trial = search.trials[too_large]
    assert trial.outcome == "left out" and trial.predicted_peak_bytes == 144 * GB
    assert trial.reason == "memory: 134.1 GiB are predicted and 74.5 may be used"
    # Recomputation is only tried with rows that do not fit without it.
    again = [choice.batch_size for choice in card.ran if choice.gradient_checkpointing]
    assert again == [16]
    assert search.best() == replace(DEFAULT, batch_size=8, gradient_accumulation_steps=2)


def test_a_trial_that_fails_is_a_result_and_the_search_goes_on() -> None:
    card = Card(speed)
    largest = replace(DEFAULT, batch_size=16, gradient_accumulation_steps=1, torch_compile=False)
    card.fails = {
        largest: TrialResult(outcome="out of memory", problem="CUDA out of memory"),
        replace(DEFAULT, torch_compile=False, attention="flex"): TrialResult(outcome="failed"),
    }
    search = card.search()
    assert search.trials[largest].outcome == "out of memory"
    assert search.trials[largest].reason == "CUDA out of memory"
    assert search.best() == replace(DEFAULT, batch_size=8, gradient_accumulation_steps=2)


def test_dominated_rows_are_left_out_and_the_slow_are_given_up() -> None:
    card = Card(speed)
    search = card.search()
    rows = {c.batch_size: t for c, t in search.trials.items() if c.attention == "packed"
            and not c.torch_compile and not c.gradient_checkpointing}  # fmt: skip
    assert rows[8].outcome == "measured" and rows[2].outcome == "left out"
    assert rows[2].reason == "dominated: 8 rows were slower already"
    masked = next(t for c, t in search.trials.items() if c.attention == "sdpa")
    assert masked.outcome == "given up"
    fastest = 1000.0 * 16 / 17
    assert card.least[masked.settings] == pytest.approx(0.9 * fastest, rel=1e-3)


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
    search = card.search()
    assert search.best() == DEFAULT
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
