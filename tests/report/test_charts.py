"""What the charts show: the figures in their labels, bands, cuts, ticks and places."""

import re

import pandas as pd
import pytest
from made_up_runs import CPU, GPU
from made_up_series import STEP_S, TOKENS_PER_STEP
from msgspec.structs import replace

from expertflow.report.build_run import REFERENCE_BANDS
from expertflow.report.charts import drawing as charts
from expertflow.report.charts import series
from expertflow.train.records import StepRecord

TIMELINE = charts.timeline_charts(GPU.inputs, REFERENCE_BANDS)


def test_a_ticks_label_is_the_number_at_its_place() -> None:
    for drawing, most in ((TIMELINE[0].wide, 10), (TIMELINE[0].narrow, 4)):
        found = re.findall(r"translate\(([\d.]+),15\)\"[^>]*>([\d.]+)(?: min)?<", drawing)
        places = [(float(x), float(label)) for x, label in found]
        assert 3 <= len(places) <= most
        per_min = places[-1][0] / places[-1][1]
        assert all(x == pytest.approx(per_min * label, abs=0.3) for x, label in places)
        assert places[-1][1] <= 45


def test_cuts_are_counted_not_guessed() -> None:
    labels = {cut.length_tokens: cut.label for cut in charts.judge_lengths(GPU.inputs.packing)}
    assert labels[1536] == "rows of 1,536: cuts 0.5 %"
    assert labels[2048] == "2,048: cuts none"  # longer than the longest document
    packing = replace(GPU.inputs.packing, choices=(), sequence_length_tokens=1_024)
    cuts = [(cut.length_tokens, cut.fraction) for cut in charts.judge_lengths(packing)]
    assert cuts == [(1024, None), (1536, None), (2048, 0.0)]


def test_series_keep_extremes_and_clocks() -> None:
    x = pd.Series(range(10_000))
    points = series.envelope(x, x % 7, n_bins=100)
    assert len(points) == 100
    assert points["low"].min() == 0 and points["high"].max() == 6
    assert points["y"].between(points["low"], points["high"]).all()
    # Steps between kept lines do not slow the speed down.
    rates = series.tokens_per_s(series.make_table(StepRecord, GPU.inputs.steps[::10]))["y"]
    assert rates.min() == pytest.approx(TOKENS_PER_STEP / STEP_S, rel=0.06)
    first, second, third, *_ = CPU.inputs.steps
    resumed = series.make_table(StepRecord, [first, second, replace(third, elapsed_s=1.0)])
    assert series.durations_s(resumed).iloc[-1] == third.step_s
    # An evaluation before training comes first.
    evaluation = replace(CPU.inputs.training.eval_points[0], step=0)
    ((_, end_s),) = series.evaluation_spans(CPU.inputs.steps, [evaluation])
    assert end_s == pytest.approx(first.elapsed_s - first.step_s)
