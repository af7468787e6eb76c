"""Draw an ablation: the ladder as a waterfall, and single changes as ratios with their intervals.

Every row has its name above its bar, so that long names need no margin and a phone shows them, too.
"""

import math

import altair as alt

from expertflow.core.format import show_hidden
from expertflow.report import ablation_facts as facts
from expertflow.report import format as f
from expertflow.report.ablation_facts import Ladder, Step, format_interval
from expertflow.report.charts import frame as fr
from expertflow.studies.records import Bar, Estimate

Rows = list[dict[str, object]]

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


def waterfall_chart(ladder: Ladder) -> fr.Chart:
    steps = ladder.steps
    most = max(step.tokens_per_s or 0.0 for step in steps)
    # One wide interval may reach a quarter beyond the longest bar, and is cut there.
    top = max(min(max(step.high or 0.0 for step in steps), LEAST_REACH * most), most)
    x = _x(fr.round_ticks(0, top, N_TICKS), SHORT, alt.Scale(domain=[0, top * 1.01], nice=False))

    def draw(form: fr.ScreenForm) -> list[alt.Chart]:
        texts = [_figure(step, form) for step in steps]
        return [
            *_frame(len(steps), x),
            *_bars(steps, x, top),
            *_letter([step.label for step in steps], texts, form),
        ]

    speeds = "; ".join(
        f"{step.label}: {step.outcome if step.tokens_per_s is None else f.short(step.tokens_per_s)}"
        for step in steps
    )
    return fr.both_sizes(
        draw, title="From the first rung to the plan",
        unit="useful tokens/s, and what each step is worth",
        label=f"Useful tokens a second from the first rung to the plan. {speeds}",
        height_px=_height(len(steps)),
    )  # fmt: skip


def changes_chart(bars: tuple[Bar, ...]) -> fr.Chart | None:
    drawn = [(bar, bar.ratio) for bar in bars if bar.ratio]
    if not drawn:
        return None
    names = [facts.label_bar(bar) for bar, _ in drawn]
    values = [ratio.value for _, ratio in drawn]
    low = max(
        min(1 / LEAST_REACH, *(min(ratio.least, ratio.low) for _, ratio in drawn)),
        min(values) / MOST_BEYOND,
    )
    high = min(
        max(LEAST_REACH, *(max(ratio.most, ratio.high) for _, ratio in drawn)),
        max(1.0, *values) * MOST_BEYOND,
    )
    # Logarithmic: half and twice as fast lie equally far from 1; the ends leave room for dots.
    scale = alt.Scale(type="log", domain=[low / 1.03, high * 1.03], nice=False)
    x = _x(_times(low, high), TIMES, scale)

    def draw(form: fr.ScreenForm) -> list[alt.Chart]:
        texts = [
            f.factor(ratio.value)
            + ("" if form is fr.NARROW else f" ({format_interval(ratio)})")
            + _odd(bar)
            for bar, ratio in drawn
        ]
        return [
            *_frame(len(drawn), x, at=1.0),
            *_dots(drawn, x, (low, high)),
            *_letter(names, texts, form),
        ]

    words = "; ".join(
        f"{name}: {f.factor(ratio.value)}{_odd(bar)}"
        for name, (bar, ratio) in zip(names, drawn, strict=True)
    )
    return fr.both_sizes(
        draw, title="One change each", unit="speed over the plan\u2019s, with 95\u00a0% intervals",
        label=f"Speed of single changes over the plan's. {words}", height_px=_height(len(drawn)),
    )  # fmt: skip


def _height(n_rows: int) -> int:
    return n_rows * ROW_PX + 22


def _x(ticks: list[float], label: str, scale: alt.Scale) -> alt.X:
    # Labels at the ends are moved inside: there is no margin for a half of them.
    axis = alt.Axis(values=ticks, title=None, labelExpr=label, labelOverlap=False, labelFlush=True)
    return alt.X("x:Q", axis=axis, scale=scale)


def _y(n_rows: int) -> alt.Y:
    return alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[n_rows, 0], nice=False))


def _frame(n_rows: int, x: alt.X, at: float = 0.0) -> list[alt.Chart]:
    base = alt.Chart(fr.inline_data([{"x": at, "y": 0, "y2": n_rows}]))
    line = base.mark_rule(color=fr.RULE, strokeWidth=1 if at else 0)
    return [line.encode(x=x, y=_y(n_rows), y2="y2:Q")]


def _bars(steps: tuple[Step, ...], x: alt.X, top: float) -> list[alt.Chart]:
    held: Rows = []  # what was there before a step
    moved: dict[str, Rows] = {}
    spread: Rows = []
    for i, step in enumerate(steps):
        speed = step.tokens_per_s
        if speed is None:
            continue
        place = {"y": i + TOP, "y2": i + BOTTOM}
        # The plan is the sum of its steps and stands on the ground.
        start = 0.0 if step.is_plan else step.before or 0.0
        if start:
            held.append({"x": 0.0, "x2": min(start, speed), **place})
        ends = {"x": min(start, speed), "x2": max(start, speed)}
        moved.setdefault(_color(step), []).append({**ends, **place})
        if step.low is not None and step.high is not None:
            middle = i + (TOP + BOTTOM) / 2
            spread.append({"x": step.low, "x2": min(step.high, top), "y": middle, "y2": middle})
    layers = []
    if held:
        layers.append(alt.Chart(fr.inline_data(held)).mark_rect(color=fr.GRAY, opacity=0.22))
    layers += [alt.Chart(fr.inline_data(at)).mark_rect(color=color) for color, at in moved.items()]
    if spread:
        layers.append(alt.Chart(fr.inline_data(spread)).mark_rule(color=fr.TEXT, strokeWidth=1.5))
    return [layer.encode(x=x, x2="x2:Q", y=_y(len(steps)), y2="y2:Q") for layer in layers]


def _color(step: Step) -> str:
    if step.is_plan:
        return fr.BLUE
    # A step whose interval holds 1 is neither gain nor loss.
    is_open = step.factor is not None and facts.makes_no_difference(step.factor)
    if step.before is None or step.tokens_per_s is None or is_open:
        return fr.GRAY
    return fr.GREEN if step.tokens_per_s >= step.before else fr.RED


def _dots(
    drawn: list[tuple[Bar, Estimate]], x: alt.X, ends: tuple[float, float]
) -> list[alt.Chart]:
    by_color: dict[str, list[tuple[float, Estimate]]] = {}
    for i, (bar, ratio) in enumerate(drawn):
        color = fr.GRAY
        if bar.is_sane is False:
            color = fr.RED
        # Orange is what the plan misses: a change that is faster than it.
        elif ratio.low > facts.NOTABLE or ratio.high < 1:
            color = fr.BLUE if ratio.high < 1 else fr.ORANGE
        by_color.setdefault(color, []).append((i + (TOP + BOTTOM) / 2, ratio))
    layers, y = [], _y(len(drawn))
    # A wide faint line from the slowest pair to the fastest, and a thin one for the interval.
    for width, opacity, least, most in ((8, 0.4, "least", "most"), (1.5, 1.0, "low", "high")):
        for color, dots in by_color.items():
            values = [
                {"x": max(getattr(ratio, least), ends[0]), "x2": min(getattr(ratio, most), ends[1]),
                 "y": place}
                for place, ratio in dots
            ]  # fmt: skip
            base = alt.Chart(fr.inline_data(values))
            line = base.mark_rule(color=color, strokeWidth=width, opacity=opacity)
            layers.append(line.encode(x=x, x2="x2:Q", y=y))
    for color, dots in by_color.items():
        base = alt.Chart(fr.inline_data([{"x": ratio.value, "y": place} for place, ratio in dots]))
        point = base.mark_point(color=color, filled=True, size=64, opacity=1)
        layers.append(point.encode(x=x, y=y))
    return layers


def _letter(names: list[str], figures: list[str], form: fr.ScreenForm) -> list[alt.Chart]:
    # Longer names end in dots, before they run into the figures.
    limit = round((NARROW_NAME_FRACTION if form is fr.NARROW else NAME_FRACTION) * form.width_px)
    layers = []
    for labels, x, mark in (
        (names, alt.value(0), {"align": "left", "color": fr.TEXT, "limit": limit}),
        (figures, alt.value("width"), {"align": "right", "color": fr.MUTED}),
    ):
        # The renderer aborts the whole process on a control character.
        values = [{"y": i + NAME, "label": show_hidden(label)} for i, label in enumerate(labels)]
        base = alt.Chart(fr.inline_data(values)).encode(x=x)
        layers += fr.draw_text(base, _y(len(labels)), **mark, baseline="middle", fontSize=12)
    return layers


def _figure(step: Step, form: fr.ScreenForm) -> str:
    if step.tokens_per_s is None:
        return step.outcome
    if step.factor is None:
        return f.short(step.tokens_per_s)
    spread = "" if form is fr.NARROW else f" ({format_interval(step.factor)})"
    return f"{f.factor(step.factor.value)}{spread} \u00b7 {f.short(step.tokens_per_s)}"


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
