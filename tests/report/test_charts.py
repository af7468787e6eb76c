"""What the charts show: the data behind each, held against the kept ones; ticks and labels."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from made_up_records import STEP_S, TOKENS_PER_STEP
from made_up_runs import PROVENANCE
from msgspec.structs import replace
from report_reading import changed

from expertflow.core.records import to_json
from expertflow.report.build import build_report
from expertflow.report.charts import drawing as charts
from expertflow.report.charts import series
from expertflow.report.charts.data import ChartData, chart_data
from expertflow.report.charts.frame import Chart
from expertflow.report.inputs import ReportInputs
from expertflow.tokens.records import LengthHistogram

GOLDEN = Path(__file__).parent / "golden"


def _data(inputs: ReportInputs) -> ChartData:
    return chart_data(build_report(inputs, PROVENANCE), inputs)


def _timeline(inputs: ReportInputs) -> list[Chart]:
    timeline = _data(inputs).timeline
    assert timeline is not None
    return [charts.panel_chart(panel, timeline) for panel in timeline.panels]


def _as_json(data: ChartData) -> dict[str, Any]:
    plain: dict[str, Any] = _short(to_json(data))
    if plain["loss"]:
        plain["loss"]["train"] = _columns(plain["loss"]["train"])
    for panel in plain["timeline"]["panels"] if plain["timeline"] else []:
        panel["points"] = _columns(panel["points"])
    return plain


def _columns(points: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [point[name] for point in points] for name in ("x", "y", "low", "high")}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value


def _same(found: object, kept: object, where: str = "") -> None:
    """Compare parsed values; the last digit of a rounded number may differ between machines."""
    if isinstance(kept, dict) and isinstance(found, dict):
        assert found.keys() == kept.keys(), where
        for key in kept:
            _same(found[key], kept[key], f"{where}.{key}")
    elif isinstance(kept, list) and isinstance(found, list):
        assert len(found) == len(kept), where
        for i, (one, other) in enumerate(zip(found, kept, strict=True)):
            _same(one, other, f"{where}[{i}]")
    elif isinstance(kept, float):
        assert found == pytest.approx(kept, rel=1e-4), where
    else:
        assert found == kept, where


@pytest.mark.parametrize("which", ["gpu", "cpu"])
def test_data_behind_the_charts(which: str, request: pytest.FixtureRequest) -> None:
    found = _as_json(_data(request.getfixturevalue(f"{which}_inputs")))
    path = GOLDEN / f"charts-{which}.json"
    if os.environ.get("EXPERTFLOW_UPDATE_GOLDEN"):
        text = json.dumps(found, indent=1, ensure_ascii=False)
        # a row of numbers is one line
        text = re.sub(r"\[[^\[\]{}\"]*\]", lambda m: " ".join(m[0].split()), text)
        path.write_text(text + "\n", encoding="utf-8")
    _same(found, json.loads(path.read_text(encoding="utf-8")))


def test_bands_mark_saves_and_evaluations(gpu_inputs: ReportInputs) -> None:
    timeline = _data(gpu_inputs).timeline
    assert timeline is not None
    assert len(timeline.saves) == len(gpu_inputs.training.save_points)
    assert len(timeline.evaluations) == len(gpu_inputs.training.eval_points)
    drawing = _timeline(gpu_inputs)[0].wide
    assert _bands(drawing, "yellow") == len(timeline.saves)
    assert _bands(drawing, "purple") == len(timeline.evaluations)


def test_bands_that_a_screen_cannot_part_are_one(gpu_inputs: ReportInputs) -> None:
    point = gpu_inputs.training.save_points[0]
    saves = tuple(replace(point, elapsed_s=float(s), save_s=0.5) for s in range(100, 1_100))
    training = replace(gpu_inputs.training, save_points=saves)
    chart = _timeline(replace(gpu_inputs, training=training))[0]
    assert _bands(chart.wide, "yellow") == 1


def _bands(drawing: str, color: str) -> int:
    paths = re.findall(rf'<path d="([^"]+)" fill="var\(--{color}\)" opacity="0.4"/>', drawing)
    return sum(path.count("M") for path in paths)


def test_reference_stripes_only_where_there_are_some(gpu_inputs: ReportInputs) -> None:
    report = build_report(gpu_inputs, PROVENANCE)
    report = changed(report, {"training_report.hardware.reference_bands": []})
    monitor = replace(gpu_inputs.monitor, temperature_limits_c=None)
    timeline = chart_data(report, replace(gpu_inputs, monitor=monitor)).timeline
    assert timeline is not None
    assert {panel.quantity: panel.limit for panel in timeline.panels}["temperature_c"] is None
    bare = [charts.panel_chart(panel, timeline) for panel in timeline.panels]
    assert not any(chart.note or "var(--gray)" in chart.wide for chart in bare)
    noted = [chart for chart in _timeline(gpu_inputs) if chart.note]
    assert noted and all("var(--gray)" in chart.wide for chart in noted)


def test_cuts_are_counted_not_guessed(gpu_inputs: ReportInputs) -> None:
    labels = {cut.length_tokens: cut.label for cut in _data(gpu_inputs).lengths.cuts}
    assert labels[1536] == "rows of 1,536: cuts 0.5 %"
    assert labels[2048] == "2,048: cuts none"  # longer than the longest document
    packing = replace(gpu_inputs.packing, choices=(), sequence_length_tokens=1_024)
    cuts = _data(replace(gpu_inputs, packing=packing)).lengths.cuts
    assert [(cut.length_tokens, cut.cut_fraction) for cut in cuts] == [
        (1024, None), (1536, None), (2048, 0.0),
    ]  # fmt: skip


def test_lengths_far_beyond_the_documents_are_said_not_drawn(gpu_inputs: ReportInputs) -> None:
    histogram = LengthHistogram(
        edges=(1, 2, 4, 8, 16, 32, 64, 128), counts=(0, 0, 3, 9, 40, 30, 8), p50=20, p90=60,
        p99=100, max=120,
    )  # fmt: skip
    packing = replace(gpu_inputs.packing, histogram=histogram, sequence_length_tokens=256)
    lengths = _data(replace(gpu_inputs, packing=packing)).lengths
    assert [cut.length_tokens for cut in lengths.shown] == [256]
    drawing = charts.length_chart(lengths).narrow
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", drawing)
    assert "4 tokens" in texts  # bins that grow have a logarithmic axis
    widths = [float(w) for w in re.findall(r"M[-\d.]+,[-\d.]+h([\d.]+)v", drawing)]
    bars = [w for w in widths if 10 < w < 100]
    assert len(bars) == 5 and max(bars) - min(bars) < 1


def test_every_label_of_an_axis_is_true(gpu_inputs: ReportInputs) -> None:
    """A tick's label is the number at its place, on the phone too."""
    chart = _timeline(gpu_inputs)[0]
    timeline = _data(gpu_inputs).timeline
    assert timeline is not None
    for drawing, most in ((chart.wide, 10), (chart.narrow, 4)):
        found = re.findall(r"translate\(([\d.]+),15\)\"[^>]*>([\d.]+)(?: min)?<", drawing)
        places = [(float(x), float(label)) for x, label in found]
        assert 3 <= len(places) <= most
        per_min = places[-1][0] / places[-1][1]
        assert all(x == pytest.approx(per_min * label, abs=0.3) for x, label in places)
        assert places[-1][1] <= timeline.end_s / 60


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
    (span,) = series.evaluation_spans(cpu_inputs.steps, points)
    assert span.end_s == pytest.approx(first.elapsed_s - first.step_s)
