"""What all charts share: sizes, axes, layers, and SVG that takes its colors from the page.

Charts are as wide as a phone, since text in a scaled SVG shrinks with it; a page has two columns.
"""

import html
import math
import re
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd
import vl_convert
from markupsafe import Markup

from expertflow.core.format import show_hidden
from expertflow.core.records import Record

# From the page's style sheet, which has a dark value for each.
BLUE, GREEN, ORANGE, PURPLE, YELLOW, RED = (
    f"var(--{name})" for name in ("blue", "green", "orange", "purple", "yellow", "red")
)
GRAY, RULE, MUTED, LIMIT, PAGE, TEXT = (
    f"var(--{name})" for name in ("gray", "rule", "muted", "limit", "page", "text")
)
WIDTH_PX = 358
# Upper bounds that leave room between labels.
N_X_TICKS, N_Y_TICKS = 4, 3
Y_AXIS_PX = 44  # the same for all charts, so that their plots line up
TIME_UNITS = ((3 * 3600, "h", 3600.0), (180, "min", 60.0), (-1, "s", 1.0))
TAG = re.compile(r"<[^>]+>")
# What the page's style sheet sets, or what no reader needs.
NEEDLESS = re.compile(
    r'\s(?:(?:font-family|pointer-events|aria-[a-z]+|role|class|xmlns:xlink|version)="[^"]*"'
    r'|opacity="1")'
)
NUMBER = "format(datum.value, ',.12~g')"
THOUSANDS = "datum.value === 0 ? '0' : format(datum.value, '~s')"
ROUND_STEPS = (1.0, 2.0, 2.5, 5.0)
ROUND_TIMES = (1.0, 1.5, 2.0, 3.0, 5.0)  # 15 and 30 min are rounder than 25


class Chart(Record, frozen=True, kw_only=True):
    """A chart as inline SVG. The page writes title, unit and note."""

    title: str
    unit: str
    svg: Markup
    note: str = ""


CONFIG = {
    "aria": False,
    "background": "transparent",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {
        "domain": False, "ticks": False, "grid": True, "gridColor": RULE, "labelColor": MUTED,
        "labelFontSize": 11, "labelPadding": 6, "title": None,
        # The ticks were chosen to fit: the library drops some before it knows the size.
        "labelOverlap": False,
    },
    "axisX": {"grid": False},
    "axisY": {"minExtent": Y_AXIS_PX, "maxExtent": Y_AXIS_PX},
    "text": {"fontSize": 11},
}  # fmt: skip


def draw_chart(
    x: alt.X,
    y: alt.Y,
    layers: list[alt.Chart],
    *,
    title: str,
    unit: str,
    label: str,
    height_px: int,
    note: str = "",
) -> Chart:
    """Draw layers that share their axes."""
    # Passed at once: each of altair's own setters would copy all points.
    chart = alt.LayerChart(
        layer=layers,
        encoding={"x": x, "y": y},
        width=WIDTH_PX,
        height=height_px,
        autosize=alt.AutoSizeParams(type="fit", contains="padding"),
        padding={"left": 0, "right": 8, "top": 6, "bottom": 2},
        config=CONFIG,
    )
    svg = Markup(_themed(vl_convert.vegalite_to_svg(chart.to_json()), label))
    return Chart(title=title, unit=unit, svg=svg, note=note)


def round_ticks(
    low: float, high: float, n_max: int, rounds: Sequence[float] = ROUND_STEPS
) -> list[float]:
    """Return at most ``n_max`` multiples of a round number from ``low`` to ``high``.

    >>> round_ticks(0, 44.6, 4, ROUND_TIMES), round_ticks(0, 100, 5)
    ([0.0, 15.0, 30.0], [0.0, 25.0, 50.0, 75.0, 100.0])
    """
    span = max(high - low, 1e-9)
    power = 10.0 ** (math.floor(math.log10(span)) - 1)
    for step in (power * scale * size for scale in (1, 10, 100) for size in rounds):
        # 0.3 / 0.1 is 2.9999999999999996, and the tick at 0.3 is needed.
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= n_max:
            # 3 * 0.1 is 0.30000000000000004, which a label would show.
            return [float(f"{i * step:.10g}") for i in range(first, last + 1)]
    return [low]


def round_up(high: float, n_max: int) -> float:
    ticks = round_ticks(0.0, high, n_max)
    if len(ticks) < 2 or ticks[-1] >= high * (1 - 1e-9):
        return high
    return ticks[-1] + ticks[1]


def time_unit(end_s: float) -> tuple[str, float]:
    return next((unit, scale) for least_s, unit, scale in TIME_UNITS if end_s > least_s)


def x_axis(values: list[float], unit: str, scale: alt.Scale) -> alt.X:
    # Only the first label has the unit: 0 min, 10, 20.
    axis = alt.Axis(
        values=values, labelExpr=f"{NUMBER} + (datum.value === {values[0]:g} ? ' {unit}' : '')"
    )
    return alt.X("x:Q", axis=axis, scale=scale)


def y_axis(values: list[float], scale: alt.Scale) -> alt.Y:
    # Tokens per second reach six digits, which do not fit into Y_AXIS_PX.
    short = max(values, default=0.0) >= 10_000
    axis = alt.Axis(values=values, labelExpr=THOUSANDS if short else NUMBER)
    return alt.Y("y:Q", axis=axis, scale=scale)


def plot(rows: list[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def plot_curve(points: pd.DataFrame, color: str) -> list[alt.Chart]:
    base = plot(points.to_dict("records"))
    line = base.mark_line(color=color, strokeWidth=1.5, strokeJoin="round")
    # Short runs have one step per bin: there is no spread to shade.
    if (points["low"] == points["high"]).all():
        return [line]
    return [base.mark_area(color=color, opacity=0.25).encode(y="low:Q", y2="high:Q"), line]


def plot_text(base: alt.Chart, *, color: str = LIMIT, **mark: Any) -> alt.Chart:
    # An outline in the page's color keeps text readable on lines; the style sheet puts it below.
    text: alt.Chart = base.mark_text(
        color=color, stroke=PAGE, strokeWidth=4, strokeJoin="round", **mark
    )
    return text


def _themed(svg: str, label: str) -> str:
    """Label the image, and drop what no reader needs.

    Only tags change: texts may be user-chosen names. In them ``<`` and ``>`` are escaped.
    """
    svg = TAG.sub(lambda tag: _lean(tag[0]), svg)
    # Paths of zero extent, which the renderer writes for empty backgrounds.
    svg = re.sub(r'<path d="(?:M0,0h0v0h0Z)?"(?: display="none")?/>', "", svg)
    label = html.escape(show_hidden(label))
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _lean(tag: str) -> str:
    # A tenth of a pixel is too small to see.
    tag = NEEDLESS.sub("", tag)
    return re.sub(r"-?\d+\.\d{2,}", lambda match: f"{float(match[0]):.1f}", tag)
