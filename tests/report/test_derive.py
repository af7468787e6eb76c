"""Figures that follow from measurements, by hand."""

from dataclasses import replace

import pytest

from expertflow.evaluate.records import TaskScore
from expertflow.report import derive
from expertflow.report.inputs import ReportInputs


def _score(n_correct: int, n: int, ci95: tuple[float, float] | None) -> TaskScore:
    return TaskScore(
        metric="m",
        n_examples=n,
        n_correct=n_correct,
        value_fraction=n_correct / n,
        ci95=ci95,
        n_by_kind={},
    )


def test_parts_add_up_to_wall_time(gpu_inputs: ReportInputs) -> None:
    assert derive.parts_s(gpu_inputs.training.time) == pytest.approx(2_712.0)


def test_mfu_by_hand(gpu_inputs: ReportInputs) -> None:
    # 96.12 M tokens in 2489 + 21.4 + 5.1 s, 2.62 GFLOP a token, of 989.5 TFLOP/s
    expected = 96.12e6 / 2_515.5 * 2.62e9 / 989.5e12
    assert derive.utilisation(gpu_inputs, 2.62e9).value == pytest.approx(expected)


def test_two_cards_have_twice_the_peak(gpu_inputs: ReportInputs) -> None:
    two = replace(gpu_inputs, training=replace(gpu_inputs.training, world_size=2))
    one = derive.utilisation(gpu_inputs, 2.62e9).value
    assert one is not None
    assert derive.utilisation(two, 2.62e9).value == pytest.approx(one / 2)


def test_another_card_than_planned_has_no_peak(gpu_inputs: ReportInputs) -> None:
    other = replace(gpu_inputs.training, gpu_name="NVIDIA L40S")
    peak = derive.peak(gpu_inputs.plan, other)
    assert peak.flops_per_s is None
    assert peak.reason is not None and "NVIDIA L40S" in peak.reason


def test_peak_follows_precision(gpu_inputs: ReportInputs) -> None:
    plan, training = gpu_inputs.plan, replace(gpu_inputs.training, precision="fp32")
    assert derive.peak(plan, training).flops_per_s == 494.5e12
    assert derive.peak(replace(plan, use_tf32=False), training).flops_per_s is None


def test_cost_is_rate_times_hours(gpu_inputs: ReportInputs) -> None:
    assert derive.cost_usd(gpu_inputs).value == pytest.approx(2.49 * 2_712 / 3600)


def test_newcombe_example() -> None:
    """Newcombe 1998, table II, example (a): 56/70 against 48/80, method 10: 0.0524 to 0.3339."""
    after = _score(56, 70, (0.6917, 0.8768))
    before = _score(48, 80, (0.4904, 0.7005))
    change = derive.score_difference(before, after)
    assert change.value_fraction == pytest.approx(0.2)
    assert change.ci95 == pytest.approx((0.0524, 0.3339), abs=3e-4)


def test_no_score_no_difference() -> None:
    change = derive.score_difference(None, _score(1, 2, None))
    assert (change.value_fraction, change.ci95) == (None, None)


@pytest.mark.parametrize(
    ("n_epochs", "started"), [(0.2, 1), (1.0, 1), (1.0000000001, 1), (1.01, 2), (3.0, 3)]
)
def test_epochs_started(n_epochs: float, started: int) -> None:
    assert derive.n_epochs_started(n_epochs) == started
