"""Draw an ablation: the ladder as a waterfall, and single changes as ratios with their intervals.

Every row has its name above its bar, so that long names need no margin and a phone shows them, too.
"""

import math

import altair as alt

from expertflow.core.format import show_hidden
from expertflow.report import ablation_facts as facts
from expertflow.report import format as f
from expertflow.report.ablation_facts import Ladder, Step
from expertflow.report.charts import frame as fr
from expertflow.studies.records import Bar, Estimate

ROW_PX = 48
N_TICKS = 3
# Positions within a row of height 1.
NAME, TOP, MIDDLE, BOTTOM = 0.27, 0.54, 0.7, 0.86
# What is left for names next to the figures, as a fraction of the width.
NAME_FRACTION = 0.6
BELOW = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
ABOVE = (1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
# Labels closer than this share of the axis would run into each other on a phone.
APART_FRACTION = 0.24
LEAST_REACH = 1.25
# An interval over few repeats can be so wide that it would leave no room for the others.
MOST_BEYOND = 2.0
SHORT = "datum.value === 0 ? '0 tokens/s' : format(datum.value, '.3~s')"
COLOR = alt.Color("color:N", scale=None)  # taken from the row
TIMES = "'×' + format(datum.value, '~g') + (datum.value === 1 ? ' the plan' : '')"


def waterfall_chart(ladder: Ladder) -> fr.Chart:
    steps = ladder.steps
    most = max(step.tokens_per_s or 0.0 for step in steps)
    # One wide interval may reach a quarter beyond the longest bar, and is cut there.
    top = max(min(max(step.high or 0.0 for step in steps), LEAST_REACH * most), most)
    axis = alt.Axis(values=fr.round_ticks(0, top, N_TICKS), labelExpr=SHORT)
    x = alt.X("x:Q", axis=axis, scale=alt.Scale(domain=[0, top * 1.01]))

    letters = _plot_letters([step.label for step in steps], [_figure(step) for step in steps])
    speeds = "; ".join(
        f"{step.label}: {step.outcome if step.tokens_per_s is None else f.short(step.tokens_per_s)}"
        for step in steps
    )
    return fr.draw_chart(
        x,
        _y(len(steps)),
        [*_plot_bars(steps, top), *letters],
        title="From the first rung to the plan",
        unit="useful tokens/s, and what each step gains",
        label=f"Useful tokens per second from the first rung to the plan. {speeds}",
        height_px=_height(len(steps)),
    )


def changes_chart(bars: tuple[Bar, ...]) -> fr.Chart | None:
    drawn = [(bar, bar.ratio) for bar in bars if bar.ratio]
    if not drawn:
        return None
    names = [facts.label_bar(bar) for bar, _ in drawn]
    values = [1.0, *(ratio.value for _, ratio in drawn)]  # the plan is drawn, too
    lows = [1 / LEAST_REACH, *(min(ratio.least, ratio.low) for _, ratio in drawn)]
    highs = [LEAST_REACH, *(max(ratio.most, ratio.high) for _, ratio in drawn)]
    low, high = (
        max(min(lows), min(values) / MOST_BEYOND),
        min(max(highs), max(values) * MOST_BEYOND),
    )
    # Logarithmic: half and twice as fast are equally far from 1; the ends leave room for dots.
    scale = alt.Scale(type="log", domain=[low / 1.03, high * 1.03])
    x = alt.X("x:Q", axis=alt.Axis(values=_times(low, high), labelExpr=TIMES), scale=scale)

    texts = [f.factor(ratio.value) + _odd(bar) for bar, ratio in drawn]
    words = "; ".join(
        f"{name}: {f.factor(ratio.value)}{_odd(bar)}"
        for name, (bar, ratio) in zip(names, drawn, strict=True)
    )
    return fr.draw_chart(
        x,
        _y(len(drawn)),
        [*_plot_dots(drawn, low, high), *_plot_letters(names, texts)],
        title="Single changes",
        unit="speed relative to the plan, with 95\u00a0% intervals",
        label=f"Speed of single changes relative to the plan. {words}",
        height_px=_height(len(drawn)),
    )


def _height(n_rows: int) -> int:
    return n_rows * ROW_PX + 29


def _y(n_rows: int) -> alt.Y:
    return alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[n_rows, 0]))


def _plot_bars(steps: tuple[Step, ...], top: float) -> list[alt.Chart]:
    rows = []
    for i, step in enumerate(steps):
        if step.tokens_per_s is not None:
            # The plan is the sum of its steps and starts at zero.
            ends = sorted((0.0 if step.is_plan else step.before or 0.0, step.tokens_per_s))
            rows.append({
                "y": i + TOP, "middle": i + MIDDLE, "y2": i + BOTTOM, "x": ends[0], "x2": ends[1],
                "low": step.low, "high": step.high and min(step.high, top), "color": _color(step),
            })  # fmt: skip
    base = fr.plot(rows)
    # The speed before a step, and what the step changed.
    held, moved = base.mark_rect(color=fr.GRAY, opacity=0.22), base.mark_rect()
    spread = base.mark_rule(color=fr.TEXT, strokeWidth=1.5)
    return [
        held.encode(x2=alt.value(0), y2="y2:Q"),
        moved.encode(x2="x2:Q", y2="y2:Q", color=COLOR),
        spread.encode(x="low:Q", x2="high:Q", y="middle:Q"),
    ]


def _color(step: Step) -> str:
    if step.is_plan:
        return fr.BLUE
    # A step whose interval includes 1 is neither gain nor loss.
    is_open = step.factor is not None and facts.makes_no_difference(step.factor)
    if step.before is None or step.tokens_per_s is None or is_open:
        return fr.GRAY
    return fr.GREEN if step.tokens_per_s >= step.before else fr.RED


def _plot_dots(drawn: list[tuple[Bar, Estimate]], low: float, high: float) -> list[alt.Chart]:
    rows = [
        {"y": i + MIDDLE, "x": ratio.value, "color": _dot_color(bar, ratio),
         **{end: min(max(getattr(ratio, end), low), high)
            for end in ("least", "low", "high", "most")}}
        for i, (bar, ratio) in enumerate(drawn)
    ]  # fmt: skip
    base = fr.plot(rows).encode(color=COLOR)
    plan = fr.plot([{"x": 1.0}]).mark_rule(color=fr.RULE)
    return [
        plan.encode(y=alt.value(0), y2=alt.value("height")),
        # A wide faint line from the slowest pair to the fastest, and a thin one for the interval.
        base.mark_rule(strokeWidth=8, opacity=0.4).encode(x="least:Q", x2="most:Q"),
        base.mark_rule(strokeWidth=1.5).encode(x="low:Q", x2="high:Q"),
        base.mark_point(filled=True, size=64, opacity=1),
    ]


def _dot_color(bar: Bar, ratio: Estimate) -> str:
    if bar.is_sane is False:
        return fr.RED
    if ratio.high < 1:
        return fr.BLUE
    # Orange is what the plan misses: a change that is faster.
    return fr.ORANGE if ratio.low > facts.NOTABLE else fr.GRAY


def _plot_letters(names: list[str], figures: list[str]) -> list[alt.Chart]:
    # The renderer aborts the entire process on a control character.
    rows = [
        {"y": i + NAME, "name": show_hidden(name), "figure": show_hidden(figure)}
        for i, (name, figure) in enumerate(zip(names, figures, strict=True))
    ]
    # Longer names end in dots, before they run into the figures.
    limit = round(NAME_FRACTION * fr.WIDTH_PX)
    base = fr.plot(rows)
    left = fr.plot_text(base, color=fr.TEXT, align="left", limit=limit, fontSize=12)
    right = fr.plot_text(base, color=fr.MUTED, align="right", fontSize=12)
    return [
        left.encode(x=alt.value(0), text="name:N"),
        right.encode(x=alt.value("width"), text="figure:N"),
    ]


def _figure(step: Step) -> str:
    if step.tokens_per_s is None:
        return step.outcome
    if step.factor is None:
        return f.short(step.tokens_per_s)
    return f"{f.factor(step.factor.value)} \u00b7 {f.short(step.tokens_per_s)}"


def _times(low: float, high: float) -> list[float]:
    """Choose 1, and the outermost round ratio on either side that is far enough from it.

    >>> _times(0.7, 1.25), _times(0.03, 1.25)
    ([0.7, 1.0, 1.2], [0.05, 1.0])
    """
    least = APART_FRACTION * math.log(high / low)
    inside = [t for t in (*BELOW, 1.0, *ABOVE) if low <= t <= high]
    return sorted({1.0, *(t for t in (inside[0], inside[-1]) if abs(math.log(t)) >= least)})


def _odd(bar: Bar) -> str:
    return ", loss differs" if bar.is_sane is False else ""
