"""What the charts show: the figures in their labels, bands, cuts, ticks and places."""

import re

import pytest
from made_up_series import STEP_S, TOKENS_PER_STEP
from msgspec.structs import replace

from expertflow.report.build_run import REFERENCE_BANDS
from expertflow.report.charts import drawing as charts
from expertflow.report.charts import series
from expertflow.report.charts.frame import Chart
from expertflow.report.inputs import ReportInputs


@pytest.fixture(scope="module")
def timeline(gpu_inputs: ReportInputs) -> list[Chart]:
    return charts.timeline_charts(gpu_inputs, REFERENCE_BANDS)


def _label(chart: Chart | None) -> str:
    assert chart is not None
    found = re.search(r'aria-label="([^"]*)"', chart.wide)
    assert found is not None
    return found[1].replace("\u00a0", " ")


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


def test_labels_tell_the_figures(
    gpu_inputs: ReportInputs, cpu_inputs: ReportInputs, timeline: list[Chart]
) -> None:
    drawn = (charts.loss_chart(gpu_inputs), *timeline, charts.length_chart(gpu_inputs.packing))
    assert tuple(map(_label, drawn)) == GPU_LABELS
    # Without a card there is nothing of one.
    assert tuple(map(_label, charts.timeline_charts(cpu_inputs, REFERENCE_BANDS))) == CPU_LABELS


def test_bands_mark_saves_and_evaluations(gpu_inputs: ReportInputs, timeline: list[Chart]) -> None:
    drawing = timeline[0].wide
    assert _bands(drawing, "yellow") == len(gpu_inputs.training.save_points)
    assert _bands(drawing, "purple") == len(gpu_inputs.training.eval_points)


def _bands(drawing: str, color: str) -> int:
    paths = re.findall(rf'<path d="([^"]+)" fill="var\(--{color}\)" opacity="0.4"/>', drawing)
    return sum(path.count("M") for path in paths)


def test_reference_stripes_only_where_there_are_some(
    gpu_inputs: ReportInputs, timeline: list[Chart]
) -> None:
    short = replace(gpu_inputs, steps=gpu_inputs.steps[:20], samples=gpu_inputs.samples[:20])
    bare = charts.timeline_charts(short, ())
    assert bare and not any(chart.note or "var(--gray)" in chart.wide for chart in bare)
    noted = [chart for chart in timeline if chart.note]
    assert noted and all("var(--gray)" in chart.wide for chart in noted)


def test_cuts_are_counted_not_guessed(gpu_inputs: ReportInputs) -> None:
    labels = {cut.length_tokens: cut.label for cut in charts.judge_lengths(gpu_inputs.packing)}
    assert labels[1536] == "rows of 1,536: cuts 0.5 %"
    assert labels[2048] == "2,048: cuts none"  # longer than the longest document
    packing = replace(gpu_inputs.packing, choices=(), sequence_length_tokens=1_024)
    cuts = charts.judge_lengths(packing)
    assert [(cut.length_tokens, cut.fraction) for cut in cuts] == [
        (1024, None), (1536, None), (2048, 0.0),
    ]  # fmt: skip


def test_every_label_of_an_axis_is_true(timeline: list[Chart]) -> None:
    """A tick's label is the number at its place, on the phone too."""
    chart = timeline[0]
    for drawing, most in ((chart.wide, 10), (chart.narrow, 4)):
        found = re.findall(r"translate\(([\d.]+),15\)\"[^>]*>([\d.]+)(?: min)?<", drawing)
        places = [(float(x), float(label)) for x, label in found]
        assert 3 <= len(places) <= most
        per_min = places[-1][0] / places[-1][1]
        assert all(x == pytest.approx(per_min * label, abs=0.3) for x, label in places)
        assert places[-1][1] <= 45


def test_envelope_keeps_extremes() -> None:
    values = [(float(x), float(x % 7)) for x in range(10_000)]
    points = series.envelope(values, n_bins=100)
    assert len(points) == 100
    assert min(p.low for p in points) == 0 and max(p.high for p in points) == 6
    assert all(p.low <= p.y <= p.high for p in points)


def test_steps_between_kept_lines_do_not_slow_the_speed_down(gpu_inputs: ReportInputs) -> None:
    rates = [point.y for point in series.tokens_per_s(gpu_inputs.steps[::10])]
    assert min(rates) == pytest.approx(TOKENS_PER_STEP / STEP_S, rel=0.06)


def test_clocks_of_steps_and_evaluations(cpu_inputs: ReportInputs) -> None:
    first, second, third, *_ = cpu_inputs.steps
    resumed = replace(third, elapsed_s=1.0)
    assert series.durations_s([first, second, resumed])[2] == third.step_s
    # An evaluation before training comes first.
    points = [replace(cpu_inputs.training.eval_points[0], step=0)]
    ((_, end_s),) = series.evaluation_spans(cpu_inputs.steps, points)
    assert end_s == pytest.approx(first.elapsed_s - first.step_s)
