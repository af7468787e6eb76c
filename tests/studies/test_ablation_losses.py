"""Explained and odd losses after the same tokens; hours of saves and reads."""

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.plan.records import TrainPlan
from expertflow.staging.records import Staged
from expertflow.studies import compare_trials
from expertflow.studies.compare_trials import compare_losses, hours_ratios, read_speed_ratios
from expertflow.studies.variants import NotMeasurableError
from expertflow.train.records import TrialResult


def result(losses: list[float], *, tokens_per_step: float = 100, **changes: Any) -> TrialResult:
    n = len(losses) - 2
    timed = {"n_timed_steps": n, "n_tokens": round(n * tokens_per_step), "timed_s": 1.0 * n}
    return TrialResult(**{"outcome": "measured", "losses": tuple(losses), **timed, **changes})


def falling(n: int = 14, scale: float = 1.0) -> list[float]:
    return [scale * (6 - 3 * i / n) for i in range(n)]


WORKERS = {"loader": "workers", "dataloader_num_workers": 4}
SDPA = {"attention": "sdpa"}


@pytest.mark.parametrize(
    ("losses", "changes", "other_rows", "bound", "is_sane"),
    [
        # The same rows agree within rounding.
        (falling(scale=1.005), WORKERS, False, 0.01, True),
        (falling(scale=1.02), WORKERS, False, 0.01, False),
        (falling(scale=0.98), WORKERS, False, 0.01, False),
        (falling(scale=1.02), {"precision": "bf16"}, False, 0.05, True),
        # The variant only had time for 8 of 14 steps, so the plan's later ones are ignored.
        (falling()[:8], SDPA, False, 0.01, True),
        ([*falling()[:13], math.nan], SDPA, False, 0.01, False),
        # Another order has a wider bound.
        (falling(scale=1.08), {}, True, 0.10, True),
        (falling(scale=0.8), {}, True, 0.10, False),
    ],
)
def test_losses_differ_as_explained(
    base: TrainPlan, losses: list[float], changes: Any, other_rows: bool, bound: float,
    is_sane: bool,
) -> None:  # fmt: skip
    plan, pair = replace(base, **changes), (result(losses), result(falling()))
    found = compare_losses([pair], base=base, plan=plan, other_rows=other_rows)
    assert (found["loss_bound"], found["is_sane"]) == (bound, is_sane)
    expected = losses[0] / 6 - 1 if math.isfinite(losses[-1]) else None
    assert found["loss_differs"] == pytest.approx(expected)


def test_other_updates_may_learn_more_but_not_less(base: TrainPlan) -> None:
    # Four small steps for one of the plan's: the same tokens.
    plan = replace(base, batch_size=1, global_batch_sequences=1)
    for scale, sane in ((1.0, True), (0.6, True), (1.3, False)):
        pair = result(falling(56, scale), tokens_per_step=25), result(falling())
        found = compare_losses([pair], base=base, plan=plan, other_rows=False)
        assert (found["loss_bound"], found["is_sane"]) == (0.25, sane)


def timed(step_s: float, save_s: float) -> list[TrialResult]:
    return [result(falling(12), timed_s=10 * step_s, save_s=save_s)]


def test_half_the_saves_of_system_d_gain_a_little(base: TrainPlan) -> None:
    # 28 saves of 2 min in 38 h, of which 37.07 h are steps: half of them are 1.2 %.
    plan = replace(base, n_steps=28_000, save_steps=1000, save_every_minutes=1e9)
    ratios, how = hours_ratios(plan, timed((38 * 3600 - 28 * 120) / 28_000, 120), saves=0.5)
    assert ratios == pytest.approx([38 / (38 - 14 / 30)])
    assert "28000 steps of" in how and "28 saves of 120 s, against 14;" in how
    # A save restarts the clock: every ninth of 100 steps of 72 s, and every thirtieth.
    often = replace(base, n_steps=100, save_steps=30, save_every_minutes=10.0)
    assert "14 saves of 2 s, against 7;" in hours_ratios(often, timed(72.0, 2.0), saves=0.5)[1]
    once = replace(plan, n_steps=10)
    with pytest.raises(NotMeasurableError, match=r"takes 1 save, and 0\.5 times as many"):
        hours_ratios(once, timed(1.0, 2.0), saves=0.5)


def test_read_speeds_are_compared_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def speed(path: Path) -> tuple[float, str]:
        asked.append(path.parts[-3])
        return (4e9 if "target" in path.parts else 1e9), "256 MiB in order"

    monkeypatch.setattr(compare_trials, "measure_file", speed)
    pair = Staged(
        kind="rows", key="k", source=str(tmp_path / "source"), target=str(tmp_path / "target"),
        reason="it is on a local disk", n_files=1, n_bytes=1,
    )  # fmt: skip
    ratios, how = read_speed_ratios(pair, n_repeats=3)
    assert ratios == [4.0, 4.0, 4.0] and "256 MiB" in how
    assert asked == ["source", "target", "target", "source", "source", "target"]
    with pytest.raises(NotMeasurableError, match="in place: it is on a local disk"):
        read_speed_ratios(replace(pair, target=None), n_repeats=3)
