"""Draw the report's charts: Vega-Altair specifications, rendered to SVG that takes page colours.

Each chart is drawn twice, for a page and for a phone, since text in a scaled SVG shrinks with it.
The only module that imports altair and vl-convert: they take a second to load.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import altair as alt
import vl_convert

from expertflow.report import series
from expertflow.report.inputs import ReportInputs
from expertflow.report.series import Point, Span

# A colour that no chart would choose by chance -> the CSS variable that takes its place.
COLOURS = {
    "#2d6cb6": "blue",
    "#3f8f5c": "green",
    "#c4602e": "orange",
    "#8a5fb1": "purple",
    "#d8d5cd": "rule",
    "#6b7281": "muted",
}
BLUE, GREEN, ORANGE, PURPLE, RULE, MUTED = COLOURS
Y_AXIS_PX = 44  # the same for all charts, so that their plots line up
GB = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The two axes that the layers of a chart share."""

    x: alt.X
    y: alt.Y


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart in both sizes, as inline SVG. Title and unit are written by the page."""

    title: str
    unit: str
    wide: str
    narrow: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What a size of screen allows."""

    width_px: int
    stretch: float
    n_x_ticks: int
    n_y_ticks: int


WIDE = Form(width_px=720, stretch=1.0, n_x_ticks=8, n_y_ticks=4)
NARROW = Form(width_px=358, stretch=1.15, n_x_ticks=4, n_y_ticks=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """What to draw over time: ``limit`` is a dashed line with its label."""

    title: str
    unit: str
    colour: str
    points: Sequence[Point]
    top: float | None = None
    limit: float | None = None
    limit_label: str = ""


def loss_chart(inputs: ReportInputs) -> Chart | None:
    """Draw training loss with its spread, and held-out loss as points."""
    points = series.training_loss(inputs.steps)
    if not points:
        return None
    held_out = [{"x": p.step, "y": p.loss} for p in inputs.training.eval_points]
    steps = alt.Scale(domain=[0, inputs.steps[-1].step], nice=False)

    def draw(form: Form) -> list[alt.Chart]:
        axes = Axes(
            x=_x(form, "steps", steps, format=",d"),
            y=_y(form.n_y_ticks, alt.Scale(zero=False)),
        )
        held = alt.Chart(_data(held_out)).encode(x=axes.x, y=axes.y)
        return [
            *_line(points, BLUE, axes),
            held.mark_line(color=ORANGE, strokeWidth=1, strokeDash=[3, 3]),
            held.mark_point(color=ORANGE, filled=True, size=44, opacity=1),
        ]

    return _chart("Loss", "nats a token", draw, height_px=190)


def timeline_charts(inputs: ReportInputs) -> list[Chart]:
    """Draw speed and hardware over time; a series without a single reading has no chart."""
    spans = series.evaluation_spans(inputs.steps, inputs.training.eval_points)
    drawn = [one for one in (_speed(inputs), *_hardware(inputs)) if one.points]
    ends_s = [one.points[-1].x for one in drawn] + [span.end_s for span in spans]
    return [_over_time(one, spans if one is drawn[0] else [], max(ends_s)) for one in drawn]


def _speed(inputs: ReportInputs) -> Series:
    points = series.tokens_per_s(inputs.steps)
    return Series(title="Useful tokens per second", unit="tok/s", colour=BLUE, points=points)


def _hardware(inputs: ReportInputs) -> list[Series]:
    monitor, samples = inputs.monitor, inputs.samples
    limit_w, total = monitor.power_limit_w, monitor.memory_total_bytes
    total_gb = None if total is None else total * GB
    return [
        Series(title="Any kernel running", unit="%", colour=GREEN, top=100,
               points=series.sampled(samples, "utilization_percent")),
        Series(title="Power", unit="W", colour=ORANGE,
               points=series.sampled(samples, "power_w"),
               limit=limit_w, limit_label=f"limit {limit_w or 0:.0f} W"),
        Series(title="GPU memory in use", unit="GB", colour=PURPLE,
               points=series.sampled(samples, "memory_used_bytes", GB),
               limit=total_gb, limit_label=f"{total_gb or 0:.0f} GB"),
        Series(title="GPU temperature", unit="\u00b0C", colour=ORANGE,
               points=series.sampled(samples, "temperature_c")),
        Series(title="CPU", unit="% of all cores", colour=GREEN, top=100,
               points=series.sampled(samples, "cpu_percent")),
        Series(title="Host memory in use", unit="GB", colour=PURPLE,
               points=series.sampled(samples, "ram_used_bytes", GB)),
    ]  # fmt: skip


def _over_time(one: Series, spans: Sequence[Span], end_s: float) -> Chart:
    unit, scale = ("min", 60.0) if end_s > 180 else ("s", 1.0)
    points = [
        Point(x=point.x / scale, y=point.y, low=point.low, high=point.high) for point in one.points
    ]
    limit = (one.limit or 0.0) * 1.18  # leaves room for the label above the line
    top = max([one.top or 0.0, limit, *(point.high for point in points)]) or 1.0
    bands = [{"x": span.start_s / scale, "x2": span.end_s / scale} for span in spans]
    time = alt.Scale(domain=[0, end_s / scale], nice=False)
    height = alt.Scale(domain=[0, top], nice=one.limit is None and one.top is None)

    def draw(form: Form) -> list[alt.Chart]:
        axes = Axes(x=_x(form, unit, time), y=_y(3, height, thousands=top >= 1e4))
        return [_bands(bands, axes.x), *_line(points, one.colour, axes), *_limit(one, axes.y)]

    return _chart(one.title, one.unit, draw, height_px=96)


def length_chart(inputs: ReportInputs) -> Chart:
    """Draw how long the documents are, and where a row ends."""
    histogram, length = inputs.packing.histogram, inputs.packing.sequence_length_tokens
    edges = zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
    bars = [{"x": low, "x2": high, "y": n} for low, high, n in edges]
    end = max(histogram.edges[-1], length * 1.02)
    tokens = alt.Scale(domain=[0, end], nice=False)
    row = alt.Chart(_data([{"x": length, "label": f"row: {length:,}"}]))
    side: dict[str, Any] = {"align": "right", "dx": -5} if length > end / 2 else {"dx": 5}

    def draw(form: Form) -> list[alt.Chart]:
        x = _x(form, "tokens", tokens, format=",d")
        y = _y(form.n_y_ticks, alt.Scale(), thousands=True)
        bar = alt.Chart(_data(bars)).mark_rect(color=BLUE, stroke=None, xOffset=0.5, x2Offset=-0.5)
        text = row.mark_text(color=ORANGE, baseline="top", **{"align": "left", **side})
        return [
            bar.encode(x=x, x2="x2:Q", y=y, y2=alt.datum(0)),
            row.mark_rule(color=ORANGE, strokeDash=[4, 3]).encode(x=x),
            text.encode(x=x, text="label:N", y=alt.value(2)),
        ]

    return _chart("Document length", "documents by tokens", draw, height_px=150)


def _x(form: Form, unit: str, scale: alt.Scale, **axis: Any) -> alt.X:
    """Make an x axis that writes its unit beside the zero alone."""
    label = f"datum.value === 0 ? '0 {unit}' : datum.label"
    bottom = alt.Axis(tickCount=form.n_x_ticks, title=None, labelExpr=label, **axis)
    return alt.X("x:Q", axis=bottom, scale=scale)


def _y(n_ticks: int, scale: alt.Scale, *, thousands: bool = False) -> alt.Y:
    left = alt.Axis(tickCount=n_ticks, title=None)
    if thousands:
        label = "datum.value === 0 ? '0' : datum.label"
        left = alt.Axis(tickCount=n_ticks, title=None, format="~s", labelExpr=label)
    return alt.Y("y:Q", axis=left, scale=scale)


def _line(points: Sequence[Point], colour: str, axes: Axes) -> list[alt.Chart]:
    """Make a line of means over a band from least to greatest."""
    base = alt.Chart(_data([asdict(point) for point in points])).encode(x=axes.x)
    line = base.mark_line(color=colour, strokeWidth=1.5, strokeJoin="round").encode(y=axes.y)
    if all(point.low == point.high for point in points):
        return [line]
    band = base.mark_area(color=colour, opacity=0.25)
    return [band.encode(y=alt.Y("low:Q", title=None), y2="high:Q"), line]


def _limit(one: Series, y: alt.Y) -> list[alt.Chart]:
    if one.limit is None:
        return []
    base = alt.Chart(_data([{"y": one.limit, "label": one.limit_label}])).encode(y=y)
    text = base.mark_text(color=ORANGE, align="right", baseline="bottom", dy=-3)
    return [
        base.mark_rule(color=ORANGE, strokeDash=[4, 3]),
        text.encode(x=alt.value("width"), text="label:N"),
    ]


def _bands(bands: list[dict[str, float]], x: alt.X) -> alt.Chart:
    spans = alt.Chart(_data(bands)).encode(x=x, x2="x2:Q")
    rectangles: alt.Chart = spans.mark_rect(color=PURPLE, opacity=0.3)
    return rectangles


def _data(rows: list[dict[str, Any]]) -> alt.InlineData:
    return alt.InlineData(values=rows)


def _chart(
    title: str, unit: str, draw: Callable[[Form], list[alt.Chart]], *, height_px: int
) -> Chart:
    wide, narrow = (_svg(draw(form), form, height_px, title) for form in (WIDE, NARROW))
    return Chart(title=title, unit=unit, wide=wide, narrow=narrow)


def _svg(layers: list[alt.Chart], form: Form, height_px: int, title: str) -> str:
    chart = (
        alt.layer(*layers)
        .properties(
            width=form.width_px,
            height=round(height_px * form.stretch),
            autosize=alt.AutoSizeParams(type="fit", contains="padding"),
            padding={"left": 0, "right": 8, "top": 6, "bottom": 2},
        )
        .configure(aria=False, background="transparent", font="sans-serif")
        .configure_view(stroke=None)
        .configure_axis(
            domain=False, ticks=False, grid=True, gridColor=RULE, labelColor=MUTED,
            labelFontSize=11, labelPadding=6,
        )
        .configure_axisX(grid=False)
        .configure_axisY(minExtent=Y_AXIS_PX, maxExtent=Y_AXIS_PX)
        .configure_text(fontSize=11)
    )  # fmt: skip
    return _themed(vl_convert.vegalite_to_svg(chart.to_json()), title)


def _themed(svg: str, title: str) -> str:
    """Hand the colours over to the page, name the picture, and drop what no reader needs."""
    for colour, name in COLOURS.items():
        svg = svg.replace(f'"{colour}"', f'"var(--{name})"')
    svg = re.sub(r'\s(?:font-family|pointer-events|aria-[a-z]+|role|class)="[^"]*"', "", svg)
    svg = re.sub(r'\s(?:opacity="1"|xmlns:xlink="[^"]*"|version="[^"]*")', "", svg)
    svg = re.sub(r"-?\d+\.\d{2,}", lambda match: f"{float(match[0]):.1f}", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
