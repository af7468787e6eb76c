"""Explained and odd losses after the same tokens; hours of saves and reads."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.plan.records import TrainPlan
from expertflow.staging.records import Staged
from expertflow.studies.compare_trials import (
    compare_losses,
    hours_ratios,
    read_speed_ratios,
)
from expertflow.studies.variants import NotMeasurableError
from expertflow.train.records import TrialResult


def result(losses: list[float], *, tokens_per_step: float = 100, n_warmup: int = 2) -> TrialResult:
    n = len(losses) - n_warmup
    return TrialResult(
        outcome="measured", n_timed_steps=n, n_tokens=round(n * tokens_per_step), timed_s=1.0 * n,
        losses=tuple(losses),
    )  # fmt: skip


def told(base: TrainPlan, own: TrialResult, plain: TrialResult, **changes: Any) -> SimpleNamespace:
    other_rows = changes.pop("other_rows", False)
    plan = replace(base, **changes)
    found = compare_losses([(own, plain)], base=base, plan=plan, other_rows=other_rows)
    return SimpleNamespace(**{key.removeprefix("loss_"): value for key, value in found.items()})


def falling(n: int, scale: float = 1.0) -> list[float]:
    return [scale * (6 - 3 * i / n) for i in range(n)]


def test_the_same_rows_agree_within_rounding(base: TrainPlan) -> None:
    workers = {"loader": "workers", "dataloader_num_workers": 4}
    plain = result(falling(14))
    close = told(base, result(falling(14, 1.005)), plain, **workers)
    assert close.is_sane and close.bound == 0.01 and close.differs == pytest.approx(0.005)
    for scale in (1.02, 0.98):
        assert told(base, result(falling(14, scale)), plain, **workers).is_sane is False
    rounded = told(base, result(falling(14, 1.02)), plain, precision="bf16")
    assert rounded.is_sane and rounded.bound == 0.05


def test_fewer_steps_are_held_against_as_many_of_the_plans(base: TrainPlan) -> None:
    # The variant only had time for 8 of 14 steps, so the plan's later ones are ignored.
    losses = falling(14)
    found = told(base, result(losses[:8]), result(losses), attention="sdpa")
    assert found.differs == pytest.approx(0) and found.is_sane


def test_other_updates_may_learn_more_but_not_less(base: TrainPlan) -> None:
    # Four small steps for one of the plan's: the same tokens.
    plain = result(falling(14))
    small = falling(56)
    for scale, sane in ((1.0, True), (0.6, True), (1.3, False)):
        own = result([scale * loss for loss in small], tokens_per_step=25)
        found = told(base, own, plain, batch_size=1, global_batch_sequences=1)
        assert found.is_sane is sane and found.bound == 0.25


def test_another_order_has_a_wider_bound(base: TrainPlan) -> None:
    found = told(base, result(falling(14, 1.08)), result(falling(14)), other_rows=True)
    assert found.is_sane and found.bound == 0.10
    assert not told(base, result(falling(14, 0.8)), result(falling(14)), other_rows=True).is_sane


def test_a_loss_of_no_number_is_odd(base: TrainPlan) -> None:
    own = result([*falling(13), float("nan")])
    assert told(base, own, result(falling(14)), attention="sdpa").is_sane is False


def timed(step_s: float, save_s: float) -> TrialResult:
    return replace(result(falling(12)), timed_s=10 * step_s, save_s=save_s)


def test_half_the_saves_of_system_d_gain_a_little(base: TrainPlan) -> None:
    # 28 saves of 2 min in 38 h, of which 37.07 h are steps: half of them are 1.2 %.
    plan = replace(base, n_steps=28_000, save_steps=1000, save_every_minutes=1e9)
    ratios, how = hours_ratios(plan, [timed((38 * 3600 - 28 * 120) / 28_000, 120)], saves=0.5)
    assert ratios == pytest.approx([38 / (38 - 14 / 30)])
    assert ratios[0] == pytest.approx(1.0124, abs=1e-4)
    assert "28000 steps of" in how and "28 saves of 120 s, against 14;" in how
    # A save restarts the clock: every ninth of 100 steps of 72 s, and every thirtieth.
    plan = replace(base, n_steps=100, save_steps=30, save_every_minutes=10.0)
    assert "14 saves of 2 s, against 7;" in hours_ratios(plan, [timed(72.0, 2.0)], saves=0.5)[1]


def test_half_of_one_save_is_no_other_number(base: TrainPlan) -> None:
    plan = replace(base, n_steps=10, save_steps=1000, save_every_minutes=1e9)
    with pytest.raises(NotMeasurableError, match=r"takes 1 save, and 0\.5 times as many"):
        hours_ratios(plan, [timed(1.0, 2.0)], saves=0.5)


def staged(source: Path, target: Path | None) -> Staged:
    return Staged(
        kind="rows", key="k", source=str(source), reason="it is on a local disk", n_files=1,
        n_bytes=1, target=None if target is None else str(target),
    )  # fmt: skip


def test_rows_that_are_read_in_place_have_no_other_speed(tmp_path: Path) -> None:
    with pytest.raises(NotMeasurableError, match="in place: it is on a local disk"):
        read_speed_ratios(staged(tmp_path, None), n_repeats=3)


def test_read_speeds_are_compared_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from expertflow.studies import compare_trials

    asked: list[str] = []

    def speed(path: Path) -> tuple[float, str]:
        asked.append(path.parts[-3])
        return (4e9 if "target" in path.parts else 1e9), "256 MiB in order"

    monkeypatch.setattr(compare_trials, "measure_file", speed)
    pair = staged(tmp_path / "source", tmp_path / "target")
    ratios, how = read_speed_ratios(pair, n_repeats=3)
    assert ratios == [4.0, 4.0, 4.0] and "256 MiB" in how
    assert asked == ["source", "target", "target", "source", "source", "target"]
