"""What the charts show: the figures in their labels, bands, cuts, ticks and places."""

import re

import pytest
from made_up_runs import CPU, GPU
from made_up_series import STEP_S, TOKENS_PER_STEP
from msgspec.structs import replace

from expertflow.report.build_run import REFERENCE_BANDS
from expertflow.report.charts import drawing as charts
from expertflow.report.charts import series
from expertflow.report.charts.frame import Chart

TIMELINE = charts.timeline_charts(GPU.inputs, REFERENCE_BANDS)
GPU_LABELS = (
    "Training loss from 2.067 to 0.522 nats a token, held-out loss from 1.730 to 0.547,"
    " over 1,800 steps",
    "Useful tokens per second in tok/s over 45 min: mean 34.0k, from 14.1k to 35.1k",
    "Tensor cores active in % over 45 min: mean 36.1, from 2.00 to 40.9",
    "SMs active in % over 45 min: mean 82.0, from 9.00 to 91.3",
    "Any kernel running in % over 45 min: mean 91.2, from 12.0 to 97.0",
    "Power in W over 45 min: mean 590, from 180 to 648; limit 700 W",
    "GPU memory in use in GB over 45 min: mean 61.7, from 0.00 to 62.2; 80 GB in all",
    "GPU temperature in °C over 45 min: mean 67.3, from 59.0 to 68.0; slow-down 87 °C",
    "CPU in % of all cores over 45 min: mean 14.0, from 10.0 to 18.0",
    "Host memory in use in GB over 45 min: mean 31.0, from 31.0 to 31.0",
    "Lengths of 19,801 documents: half have at most 341 tokens, 99 % at most 1,388, the"
    " longest 1,591; rows of 1,536 tokens",
)
CPU_LABELS = (
    GPU_LABELS[1],
    "CPU in % of all cores over 45 min: mean 92.4, from 40.0 to 97.0",
    "Host memory in use in GB over 45 min: mean 3.18, from 3.10 to 3.18",
)


def _label(chart: Chart | None) -> str:
    assert chart is not None
    (found,) = re.findall(r'aria-label="([^"]*)"', chart.wide)
    return str(found).replace("\u00a0", " ")


def test_labels_and_ticks_tell_the_figures() -> None:
    drawn = (charts.loss_chart(GPU.inputs), *TIMELINE, charts.length_chart(GPU.inputs.packing))
    assert tuple(map(_label, drawn)) == GPU_LABELS
    # Without a card there is nothing of one.
    assert tuple(map(_label, charts.timeline_charts(CPU.inputs, REFERENCE_BANDS))) == CPU_LABELS
    # A tick's label is the number at its place, on the phone too.
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
    points = series.envelope([(float(x), float(x % 7)) for x in range(10_000)], n_bins=100)
    assert len(points) == 100
    assert min(p.low for p in points) == 0 and max(p.high for p in points) == 6
    assert all(p.low <= p.y <= p.high for p in points)
    # Steps between kept lines do not slow the speed down.
    rates = [point.y for point in series.tokens_per_s(GPU.inputs.steps[::10])]
    assert min(rates) == pytest.approx(TOKENS_PER_STEP / STEP_S, rel=0.06)
    first, second, third, *_ = CPU.inputs.steps
    resumed = replace(third, elapsed_s=1.0)
    assert series.durations_s([first, second, resumed])[2] == third.step_s
    # An evaluation before training comes first.
    points = [replace(CPU.inputs.training.eval_points[0], step=0)]
    ((_, end_s),) = series.evaluation_spans(CPU.inputs.steps, points)
    assert end_s == pytest.approx(first.elapsed_s - first.step_s)
