"""Draw the report's charts: Vega-Altair specifications, rendered to SVG.

Only this module and its frame import altair and vl-convert: they take a second to load.
"""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
from msgspec.structs import replace

from expertflow.report import format as f
from expertflow.report.charts import frame as fr
from expertflow.report.charts import series
from expertflow.report.charts.data import Cut, LengthData, LossData, Panel, TimelineData
from expertflow.report.charts.series import Point, Span

LEAST_BAND_PX = 2  # a pause of two seconds in an hour still shows
LINE_PX = 15
CENTRE = 0.45  # labels right of it run to the left


def loss_chart(loss: LossData) -> fr.Chart:
    held_out = [{"x": mark.x, "y": mark.y} for mark in loss.held_out]
    values = [y for p in loss.train for y in (p.low, p.high)]
    values += [mark.y for mark in loss.held_out]
    room = 0.04 * (max(values) - min(values)) or 0.1
    low, high = min(values) - room, max(values) + room
    start = 0.0 if any(mark.x == 0 for mark in loss.held_out) else loss.train[0].x
    steps = alt.Scale(domain=[min(start, loss.last_step - 1), loss.last_step], nice=False)
    height = alt.Scale(domain=[low, high], nice=False)

    def draw(form: fr.Form) -> list[alt.Chart]:
        x = fr.x_axis(fr.round_ticks(start, loss.last_step, form.n_x_ticks), "steps", steps)
        y = fr.y_axis(fr.round_ticks(low, high, form.n_y_ticks + 1), height)
        held = alt.Chart(fr.rows(held_out)).encode(x=x, y=y)
        return [
            *fr.curve(_fitting(loss.train, form), fr.BLUE, x, y),
            held.mark_line(color=fr.ORANGE, strokeWidth=1, strokeDash=[3, 3]),
            held.mark_point(color=fr.ORANGE, filled=True, size=44, opacity=1),
        ]

    return fr.both_sizes(draw, title="Loss", unit="nats a token", label=loss.label, height_px=190)


def panel_chart(panel: Panel, timeline: TimelineData) -> fr.Chart:
    unit, scale = fr.time_unit(timeline.end_s)
    end = timeline.end_s / scale
    highest = max(point.high for point in panel.points)
    limit = (panel.limit or 0.0) * 1.2  # leaves room for the label above the line
    top = max(panel.top or 0.0, limit, highest, panel.bottom + 1e-9)
    if panel.limit is None and panel.top is None:
        top = fr.rounded_up(top, 3)
    bottom = min(panel.bottom, *(10 * math.floor(p.low / 10) for p in panel.points))
    time = alt.Scale(domain=[0, end], nice=False)
    height = alt.Scale(domain=[bottom, top], nice=False)
    points = [replace(point, x=point.x / scale) for point in panel.points]
    reference = [f"{s.label}: {s.low:g} to {s.high:g} {panel.unit}" for s in panel.reference]
    bands = [{"x": 0, "x2": end, "y": s.low, "y2": s.high} for s in panel.reference]
    stripes = alt.Chart(fr.rows(bands)).mark_rect(color=fr.GRAY, opacity=0.16)

    def draw(form: fr.Form) -> list[alt.Chart]:
        x = fr.x_axis(fr.round_ticks(0.0, end, form.n_x_ticks, fr.ROUND_TIMES), unit, time)
        ticks = fr.round_ticks(bottom, panel.limit or top, min(4, form.n_y_ticks))
        y, least = fr.y_axis(ticks, height), LEAST_BAND_PX * end / form.width_px
        return [
            *([stripes.encode(x=x, x2="x2:Q", y=y, y2="y2:Q")] if panel.reference else []),
            _bands(timeline.saves, fr.YELLOW, x, scale, least),
            _bands(timeline.evaluations, fr.PURPLE, x, scale, least),
            *fr.curve(_fitting(points, form), fr.NAMED[panel.color], x, y),
            *_limit(panel, y),
        ]

    return fr.both_sizes(
        draw, title=panel.title, unit=panel.unit, label=panel.label, height_px=96,
        note="; ".join(reference),
    )  # fmt: skip


def _bands(spans: tuple[Span, ...], color: str, x: alt.X, scale: float, least: float) -> alt.Chart:
    values: list[dict[str, float]] = []
    for span in spans:
        start, end = span.start_s / scale, max(span.end_s / scale, span.start_s / scale + least)
        if values and start - values[-1]["x2"] < least / 2:  # no gap that a screen could show
            values[-1]["x2"] = max(values[-1]["x2"], end)
        else:
            values.append({"x": start, "x2": end})
    bands: alt.Chart = alt.Chart(fr.rows(values)).mark_rect(color=color, opacity=0.4)
    return bands.encode(x=x, x2="x2:Q")


def _limit(panel: Panel, y: alt.Y) -> list[alt.Chart]:
    if panel.limit is None:
        return []
    base = alt.Chart(fr.rows([{"y": panel.limit, "label": panel.limit_label}]))
    text = base.encode(x=alt.value("width"))
    return [
        base.mark_rule(color=fr.ORANGE, strokeDash=[4, 3]).encode(y=y),
        *fr.lettering(text, y, align="right", baseline="bottom", dy=-3),
    ]


def length_chart(lengths: LengthData) -> fr.Chart:
    edges = lengths.edges
    grows = edges[0] > 0 and edges[-1] - edges[-2] > 2 * (edges[1] - edges[0])
    bars = [
        {"x": low, "x2": high, "y": n}
        for low, high, n in zip(edges, edges[1:], lengths.counts, strict=False)
    ]
    if grows:  # the short end, where nothing is, would take half the width
        bars = bars[next((i for i, bar in enumerate(bars) if bar["y"]), 0) :]
    start = bars[0]["x"] if bars else 0
    end = max([edges[-1], *(cut.length_tokens * 1.02 for cut in lengths.shown)])
    most = max([*lengths.counts, 1])
    log: dict[str, Any] = {"type": "log", "base": 2} if grows else {}
    tokens = alt.Scale(domain=[start, end], nice=False, **log)
    height = alt.Scale(domain=[0, most * (1.04 + 0.17 * len(lengths.shown))], nice=False)

    def draw(form: fr.Form) -> list[alt.Chart]:
        ticks = _powers(start, end, form.n_x_ticks) if grows else _dozens(end, form.n_x_ticks)
        x = fr.x_axis(ticks, "tokens", tokens)
        y = fr.y_axis(fr.round_ticks(0, most, min(4, form.n_y_ticks)), height)
        bar = alt.Chart(fr.rows(bars)).mark_rect(
            color=fr.BLUE, stroke=None, xOffset=0.5, x2Offset=-0.5
        )
        places = [_share(cut.length_tokens, start, end, log=grows) for cut in lengths.shown]
        cuts = [
            _cut(lengths.shown[i], line, x, to_the_left=places[i] > CENTRE)
            for line, i in enumerate(_outside_in(places))
        ]
        lines, texts = [cut[0] for cut in cuts], [text for cut in cuts for text in cut[1:]]
        return [bar.encode(x=x, x2="x2:Q", y=y, y2=alt.datum(0)), *lines, *texts]

    unit = f"{sum(lengths.counts):,} documents by tokens"
    if lengths.fill_fraction is not None:
        unit += f"; rows are {f.percent(lengths.fill_fraction)} full"
    return fr.both_sizes(
        draw, title="Document length", unit=unit, label=lengths.label, height_px=170
    )


def _cut(cut: Cut, line: int, x: alt.X, *, to_the_left: bool) -> list[alt.Chart]:
    top = 2 + LINE_PX * line
    base = alt.Chart(fr.rows([{"x": cut.length_tokens, "label": cut.label}])).encode(x=x)
    return [
        base.mark_rule(color=fr.ORANGE, strokeDash=[] if cut.is_chosen else [4, 3]).encode(
            y=alt.value(top), y2=alt.value("height")
        ),
        *fr.lettering(
            base, alt.value(top), baseline="top",
            align="right" if to_the_left else "left", dx=-5 if to_the_left else 5,
            fontWeight="bold" if cut.is_chosen else "normal",
        ),
    ]  # fmt: skip


def _outside_in(places: list[float]) -> list[int]:
    right = [i for i, place in enumerate(places) if place > CENTRE]
    return [*reversed(right), *(i for i in range(len(places)) if i not in right)]


def _share(value: float, start: float, end: float, *, log: bool) -> float:
    if log:
        return math.log(value / start) / math.log(end / start) if value > start else 0.0
    return (value - start) / (end - start)


def _powers(start: float, end: float, n_max: int) -> list[float]:
    powers = [2.0**i for i in range(math.ceil(math.log2(start)), math.floor(math.log2(end)) + 1)]
    return powers[:: -(-len(powers) // n_max)] if powers else [start]


def _dozens(end: float, n_max: int) -> list[float]:
    step = 2.0 ** max(0, math.floor(math.log2(end)) - 4)
    while end / step >= n_max:
        step *= 2
    return [i * step for i in range(int(end / step) + 1)]


def _fitting(points: Sequence[Point], form: fr.Form) -> list[Point]:
    """Return half as many bins for a phone."""
    return series.joined(points, -(-len(points) // 2)) if form is fr.NARROW else list(points)
