"""Draw an ablation: the ladder as a waterfall, and single changes as ratios with their intervals.

Every row has its name above its bar, so that long names need no margin and a phone shows them, too.
"""

import math
from typing import Any

import altair as alt

from expertflow.report import format as f
from expertflow.report.ablation_facts import (
    NOTABLE,
    Ladder,
    Step,
    bare,
    interval,
    label,
    makes_no_difference,
)
from expertflow.report.charts.frame import (
    BLUE,
    GREEN,
    GREY,
    MUTED,
    NARROW,
    ORANGE,
    PAGE,
    RED,
    RULE,
    TEXT,
    Chart,
    Form,
    both_sizes,
    round_ticks,
    rows,
)
from expertflow.studies.records import Bar, Estimate

ROW_PX = 37
N_TICKS = 3
# Places within a row of height 1.
NAME, TOP, BOTTOM = 0.27, 0.54, 0.86
# What is left for names beside the figures, as a fraction of the width.
NAME_FRACTION, NARROW_NAME_FRACTION = 0.66, 0.6
BELOW = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
ABOVE = (1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
# Labels closer than this share of the axis would run into each other on a phone.
APART_FRACTION = 0.24
LEAST_REACH = 1.25
# An interval over few repeats can be so wide that it would leave no room for the rest.
MOST_BEYOND = 2.0
SHORT = "datum.value === 0 ? '0 tokens/s' : format(datum.value, '.3~s')"
TIMES = "'×' + format(datum.value, '~g') + (datum.value === 1 ? ' the plan' : '')"


def waterfall_chart(ladder: Ladder) -> Chart:
    steps = ladder.steps
    most = max(step.tokens_per_s or 0.0 for step in steps)
    top = min(max(step.high or 0.0 for step in steps), LEAST_REACH * most)
    top = max(top, most)
    x = alt.Scale(domain=[0, top * 1.01], nice=False)

    def draw(form: Form) -> list[alt.Chart]:
        ticks = round_ticks(0, top, N_TICKS)
        return [
            *_frame(len(steps), _axis(ticks, SHORT, x)),
            *_bars(steps, _axis(ticks, SHORT, x), top),
            *_names([step.label for step in steps], form),
            *_figures([_figure(step, form) for step in steps]),
        ]

    return both_sizes(
        draw, title="From the first rung to the plan",
        unit="useful tokens/s, and what each step is worth",
        label=_waterfall_words(ladder), height_px=_height(len(steps)),
    )  # fmt: skip


def changes_chart(bars: tuple[Bar, ...]) -> Chart | None:
    drawn = [(bar, bar.ratio) for bar in bars if bar.ratio]
    if not drawn:
        return None
    names = [label(bar) for bar, _ in drawn]
    values = [ratio.value for _, ratio in drawn]
    low = max(
        min(1 / LEAST_REACH, *(min(ratio.least, ratio.low) for _, ratio in drawn)),
        min(values) / MOST_BEYOND,
    )
    high = min(
        max(LEAST_REACH, *(max(ratio.most, ratio.high) for _, ratio in drawn)),
        max(1.0, *values) * MOST_BEYOND,
    )
    x = alt.Scale(type="log", domain=[low / 1.03, high * 1.03], nice=False)

    def draw(form: Form) -> list[alt.Chart]:
        axis = _axis(_times(low, high), TIMES, x)
        ratios = [ratio for _, ratio in drawn]
        return [
            *_frame(len(drawn), axis, at=1.0),
            *_dots(ratios, _by_colour(drawn), axis, (low, high)),
            *_names(names, form),
            *_figures([_ratio_figure(bar, ratio, form) for bar, ratio in drawn]),
        ]

    words = "; ".join(
        f"{name}: {f.factor(ratio.value)}{_odd(bar)}"
        for name, (bar, ratio) in zip(names, drawn, strict=True)
    )
    return both_sizes(
        draw, title="One change each", unit="speed over the plan\u2019s, with 95\u00a0% intervals",
        label=f"Speed of single changes over the plan's. {words}", height_px=_height(len(drawn)),
    )  # fmt: skip


def _height(n_rows: int) -> int:
    return n_rows * ROW_PX + 22


def _axis(ticks: list[float], label: str, scale: alt.Scale) -> alt.X:
    # Labels at the ends are moved inside: there is no margin for a half of them.
    axis = alt.Axis(
        values=ticks, title=None, labelExpr=label, labelOverlap=False, labelFlush=True
    )  # fmt: skip
    return alt.X("x:Q", axis=axis, scale=scale)


def _y(name: str, n_rows: int) -> alt.Y:
    return alt.Y(f"{name}:Q", axis=None, scale=alt.Scale(domain=[n_rows, 0], nice=False))


def _frame(n_rows: int, x: alt.X, at: float = 0.0) -> list[alt.Chart]:
    base = alt.Chart(rows([{"x": at, "y": 0, "y2": n_rows}]))
    line = base.mark_rule(color=RULE, strokeWidth=1 if at else 0)
    return [line.encode(x=x, y=_y("y", n_rows), y2="y2:Q")]


def _bars(steps: tuple[Step, ...], x: alt.X, top: float) -> list[alt.Chart]:
    n = len(steps)
    y, y2 = _y("y", n), "y2:Q"
    held, moved, spread = _shapes(steps, top)
    layers = []
    if held:  # what was there before this step
        layers.append(alt.Chart(rows(held)).mark_rect(color=GREY, opacity=0.22))
    for colour, values in moved.items():
        layers.append(alt.Chart(rows(values)).mark_rect(color=colour))
    drawn = [layer.encode(x=x, x2="x2:Q", y=y, y2=y2) for layer in layers]
    if spread:
        line = alt.Chart(rows(spread)).mark_rule(color=TEXT, strokeWidth=1.5)
        drawn.append(line.encode(x=x, x2="x2:Q", y=y, y2=y2))
    return drawn


Rows = list[dict[str, Any]]


def _shapes(steps: tuple[Step, ...], top: float) -> tuple[Rows, dict[str, Rows], Rows]:
    held: Rows = []
    moved: dict[str, Rows] = {}
    spread: Rows = []
    for i, step in enumerate(steps):
        speed = step.tokens_per_s
        if speed is None:
            continue
        place = {"y": i + TOP, "y2": i + BOTTOM}
        start = 0.0 if step.is_plan else step.before or 0.0
        if start:
            held.append({"x": 0.0, "x2": min(start, speed), **place})
        ends = {"x": min(start, speed), "x2": max(start, speed)}
        moved.setdefault(_colour(step), []).append({**ends, **place})
        if step.low is not None and step.high is not None:
            middle = i + (TOP + BOTTOM) / 2
            spread.append({"x": step.low, "x2": min(step.high, top), "y": middle, "y2": middle})
    return held, moved, spread


def _colour(step: Step) -> str:
    if step.is_plan:
        return BLUE
    is_open = step.factor is not None and makes_no_difference(step.factor)
    if step.before is None or step.tokens_per_s is None or is_open:
        return GREY
    return GREEN if step.tokens_per_s >= step.before else RED


def _dots(
    ratios: list[Estimate],
    by_colour: dict[str, list[int]],
    x: alt.X,
    ends: tuple[float, float],
) -> list[alt.Chart]:
    n, middle = len(ratios), (TOP + BOTTOM) / 2
    layers = []
    for width, opacity, names in ((8, 0.4, ("least", "most")), (1.5, 1.0, ("low", "high"))):
        for colour, places in by_colour.items():
            values = [
                {"x": max(getattr(ratios[i], names[0]), ends[0]),
                 "x2": min(getattr(ratios[i], names[1]), ends[1]), "y": i + middle}
                for i in places
            ]  # fmt: skip
            line = alt.Chart(rows(values)).mark_rule(
                color=colour, strokeWidth=width, opacity=opacity
            )
            layers.append(line.encode(x=x, x2="x2:Q", y=_y("y", n)))
    for colour, places in by_colour.items():
        values = [{"x": ratios[i].value, "y": i + middle} for i in places]
        point = alt.Chart(rows(values)).mark_point(color=colour, filled=True, size=64, opacity=1)
        layers.append(point.encode(x=x, y=_y("y", n)))
    return layers


def _by_colour(drawn: list[tuple[Bar, Estimate]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, (bar, ratio) in enumerate(drawn):
        colour = ORANGE if ratio.low > NOTABLE else BLUE if ratio.high < 1 else GREY
        found.setdefault(RED if bar.is_sane is False else colour, []).append(i)
    return found


def _names(labels: list[str], form: Form) -> list[alt.Chart]:
    share = NARROW_NAME_FRACTION if form is NARROW else NAME_FRACTION
    limit = round(share * form.width_px)
    return _texts(labels, alt.value(0), align="left", color=TEXT, limit=limit)


def _figures(texts: list[str]) -> list[alt.Chart]:
    return _texts(texts, alt.value("width"), align="right", color=MUTED)


def _texts(labels: list[str], x: Any, *, color: str, **mark: Any) -> list[alt.Chart]:
    values = [{"y": i + NAME, "label": label} for i, label in enumerate(labels)]
    base = alt.Chart(rows(values)).encode(x=x, y=_y("y", len(labels)), text="label:N")
    mark |= {"baseline": "middle", "fontSize": 12}
    rim = base.mark_text(stroke=PAGE, strokeWidth=4, strokeJoin="round", color=PAGE, **mark)
    return [rim, base.mark_text(color=color, **mark)]


def _figure(step: Step, form: Form) -> str:
    if step.tokens_per_s is None:
        return step.outcome
    if step.factor is None:
        return f.short(step.tokens_per_s)
    worth = f.factor(step.factor.value)
    if form is not NARROW:
        worth = f"{worth} ({interval(step.factor)})"
    return f"{worth} \u00b7 {f.short(step.tokens_per_s)}"


def _ratio_figure(bar: Bar, ratio: Estimate, form: Form) -> str:
    spread = "" if form is NARROW else f" ({bare(ratio.low)} to {bare(ratio.high)})"
    return f"{f.factor(ratio.value)}{spread}{_odd(bar)}"


def _waterfall_words(ladder: Ladder) -> str:
    speeds = "; ".join(
        f"{step.label}: {step.outcome if step.tokens_per_s is None else f.short(step.tokens_per_s)}"
        for step in ladder.steps
    )
    return f"Useful tokens a second from the first rung to the plan. {speeds}"


def _times(low: float, high: float) -> list[float]:
    """Choose 1, and the outermost round ratio on either side that stands far enough from it.

    >>> _times(0.7, 1.25), _times(0.03, 1.25)
    ([0.7, 1.0, 1.2], [0.05, 1.0])
    """
    least = APART_FRACTION * math.log(high / low)
    ends = [*[t for t in BELOW if t >= low][:1], *[t for t in ABOVE if t <= high][-1:]]
    return sorted({1.0, *(t for t in ends if abs(math.log(t)) >= least)})


def _odd(bar: Bar) -> str:
    return ", loss differs" if bar.is_sane is False else ""
