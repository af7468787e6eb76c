"""Thinning of series for drawing."""

import pytest
from made_up_records import STEP_S, TOKENS_PER_STEP
from msgspec.structs import replace

from expertflow.report.charts import series
from expertflow.report.inputs import ReportInputs


def test_envelope_keeps_extremes() -> None:
    values = [(float(x), float(x % 7)) for x in range(10_000)]
    points = series.envelope(values, n_bins=100)
    assert len(points) == 100
    assert min(p.low for p in points) == 0 and max(p.high for p in points) == 6
    assert all(p.low <= p.y <= p.high for p in points)


def test_resumed_clock_does_not_go_backwards(cpu_inputs: ReportInputs) -> None:
    steps = list(cpu_inputs.steps[:3])
    steps[2] = replace(steps[2], elapsed_s=1.0)
    assert series.durations_s(steps)[2] == steps[2].step_s


def test_steps_between_kept_lines_do_not_slow_the_speed_down(gpu_inputs: ReportInputs) -> None:
    rates = [point.y for point in series.tokens_per_s(gpu_inputs.steps[::10])]
    assert min(rates) == pytest.approx(TOKENS_PER_STEP / STEP_S, rel=0.06)


def test_evaluation_before_training_comes_first(cpu_inputs: ReportInputs) -> None:
    points = [replace(cpu_inputs.training.eval_points[0], step=0)]
    (span,) = series.evaluation_spans(cpu_inputs.steps, points)
    first = cpu_inputs.steps[0]
    assert span.end_s == pytest.approx(first.elapsed_s - first.step_s)


def test_halving_keeps_extremes() -> None:
    points = series.envelope([(float(x), float(x % 7)) for x in range(9)])
    halves = series.halved(points)
    assert len(halves) == 5 and halves[0].x == 0.5
    assert (halves[3].low, halves[3].high) == (0, 6)
    assert series.halved([]) == []
