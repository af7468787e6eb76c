"""Draw the report's charts: Vega-Altair specifications, rendered to SVG.

Only the modules of this package import altair and vl-convert: they take a second to load. Points
are a table of x, y, low and high, ordered by x; long series are thinned out to a few hundred bins,
with the spread inside each.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import asdict

from expertflow.hardware.records import GpuSample
from expertflow.report import format as f
from expertflow.report.bill import join_intervals
from expertflow.report.charts import frame as fr
from expertflow.report.inputs import ReportInputs
from expertflow.report.records import Interval
from expertflow.report.run_records import ReferenceBand
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import EvalPoint, StepRecord

GB = 1e-9
LENGTHS_TO_JUDGE = (1536, 2048)  # where the setups that this replaces cut documents
LEAST_BAND_PX = 2  # a pause of two seconds in an hour still shows
LINE_PX = 15
N_BINS = 180
CENTER = 0.45  # labels right of it run to the left


def loss_chart(inputs: ReportInputs) -> fr.Chart | None:
    if not inputs.steps:
        return None
    table = make_table(StepRecord, inputs.steps)
    train = envelope(table["step"], table["loss"])
    begin, end = train.iloc[0], train.iloc[-1]
    held_out = [{"x": point.step, "y": point.loss} for point in inputs.training.eval_points]
    last_step = inputs.steps[-1].step
    label = f"Training loss from {f.loss(begin.y)} to {f.loss(end.y)} nats per token"
    if held_out:
        first, last = held_out[0]["y"], held_out[-1]["y"]
        label += f", held-out loss from {f.loss(first)} to {f.loss(last)}"
    values = [train["low"].min(), train["high"].max(), *(point["y"] for point in held_out)]
    # A loss that never changes still needs an axis of some height.
    room = 0.04 * (max(values) - min(values)) or 0.1
    low, high = min(values) - room, max(values) + room
    # An evaluation before the first step is at 0, left of the training loss.
    start = 0.0 if any(point["x"] == 0 for point in held_out) else begin.x
    # A run of one step would have an axis of zero width.
    steps = alt.Scale(domain=[min(start, last_step - 1), last_step])
    height = alt.Scale(domain=[low, high])

    # Without evaluations an empty layer draws nothing.
    held = fr.plot(held_out)
    return fr.draw_chart(
        fr.x_axis(fr.round_ticks(start, last_step, fr.N_X_TICKS), "steps", steps),
        fr.y_axis(fr.round_ticks(low, high, fr.N_Y_TICKS + 1), height),
        [
            *fr.plot_curve(train, fr.BLUE),
            held.mark_line(color=fr.ORANGE, strokeWidth=1, strokeDash=[3, 3]),
            held.mark_point(color=fr.ORANGE, filled=True, size=44, opacity=1),
        ],
        title="Loss",
        unit="nats per token",
        label=f"{label}, over {last_step:,} steps",
        height_px=247,
    )


class Panel(NamedTuple):
    """One quantity over time. ``limit`` is drawn as a dashed line with its label.

    The axis reaches from ``bottom`` to ``top`` or to the greatest value, whichever is more.
    """

    quantity: str
    title: str
    unit: str
    color: str
    points: pd.DataFrame
    bottom: float = 0.0
    top: float | None = None
    limit: float | None = None
    limit_label: str = ""


def timeline_charts(inputs: ReportInputs, bands: Sequence[ReferenceBand]) -> list[fr.Chart]:
    """Draw each quantity that was read over the run's time, with saves and evaluations marked."""
    panels = [panel for panel in list_panels(inputs) if len(panel.points)]
    saves = [(p.elapsed_s, p.elapsed_s + p.save_s) for p in inputs.training.save_points]
    evaluations = evaluation_spans(inputs.steps, inputs.training.eval_points)
    ends_s = [
        *(panel.points["x"].iloc[-1] for panel in panels),
        *(e for _, e in (*saves, *evaluations)),
    ]
    stripes = [(band, GB if band.unit == "bytes" else 1.0) for band in bands]
    return [
        _panel_chart(
            panel,
            [(x.system, x.low * k, x.high * k) for x, k in stripes if x.quantity == panel.quantity],
            ((saves, fr.YELLOW), (evaluations, fr.PURPLE)),
            max(ends_s),
        )
        for panel in panels
    ]


def list_panels(inputs: ReportInputs) -> list[Panel]:
    monitor, samples = inputs.monitor, make_table(GpuSample, inputs.samples)
    total_gb = None if monitor.memory_total_bytes is None else monitor.memory_total_bytes * GB
    slow_c = (monitor.temperature_limits_c or {}).get("slowdown")

    def read(field: str, scale: float = 1.0) -> pd.DataFrame:
        return envelope(samples["elapsed_s"], samples[field].astype(float) * scale)

    return [
        Panel("useful_tokens_per_s", "Useful tokens per second", "tok/s", fr.BLUE,
              tokens_per_s(make_table(StepRecord, inputs.steps))),
        Panel("tensor_active_percent", "Tensor cores active", "%", fr.GREEN,
              read("tensor_active_percent"), top=100.0),
        Panel("sm_active_percent", "SMs active", "%", fr.GREEN, read("sm_active_percent"),
              top=100.0),
        Panel("any_kernel_percent", "Any kernel running", "%", fr.GREEN,
              read("utilization_percent"), top=100.0),
        Panel("power_w", "Power", "W", fr.ORANGE, read("power_w"), limit=monitor.power_limit_w,
              limit_label=f"limit {monitor.power_limit_w or 0:.0f} W"),
        Panel("memory_used_bytes", "GPU memory in use", "GB", fr.PURPLE,
              read("memory_used_bytes", GB), limit=total_gb,
              limit_label=f"{total_gb or 0:.3g} GB total"),
        Panel("temperature_c", "GPU temperature", "°C", fr.ORANGE, read("temperature_c"),
              bottom=20.0, limit=slow_c, limit_label=f"slowdown {slow_c or 0:.0f} °C"),
        Panel("cpu_percent", "CPU", "% of all cores", fr.GREEN, read("cpu_percent"), top=100.0),
        Panel("ram_used_bytes", "Host memory in use", "GB", fr.PURPLE, read("ram_used_bytes", GB)),
    ]  # fmt: skip


def _panel_chart(
    panel: Panel,
    stripes: list[tuple[str, float, float]],
    pauses: Iterable[tuple[list[Interval], str]],
    end_s: float,
) -> fr.Chart:
    unit, scale = fr.time_unit(end_s)
    end, values = end_s / scale, panel.points
    lowest, highest = values["low"].min(), values["high"].max()
    label = (
        f"{panel.title} in {panel.unit} over {f.duration(end_s)}:"
        f" from {f.short(lowest)} to {f.short(highest)}"
    )
    limit = (panel.limit or 0.0) * 1.2  # leaves room for the label above the line
    top = max(panel.top or 0.0, limit, highest, panel.bottom + 1e-9)
    if panel.limit is None and panel.top is None:
        top = fr.round_up(top, 3)
    # A card in a cold room may be below the usual start of the axis.
    bottom = min(panel.bottom, 10 * math.floor(lowest / 10))
    time = alt.Scale(domain=[0, end])
    height = alt.Scale(domain=[bottom, top])
    points = values.assign(x=values["x"] / scale)
    bands = [{"x": 0, "x2": end, "y": low, "y2": high} for _, low, high in stripes]
    striped = fr.plot(bands).mark_rect(color=fr.GRAY, opacity=0.16)

    least = LEAST_BAND_PX * end / fr.WIDTH_PX
    return fr.draw_chart(
        fr.x_axis(fr.round_ticks(0.0, end, fr.N_X_TICKS, fr.ROUND_TIMES), unit, time),
        fr.y_axis(fr.round_ticks(bottom, panel.limit or top, fr.N_Y_TICKS), height),
        [
            striped.encode(x2="x2:Q", y2="y2:Q"),
            *(_plot_bands(spans, color, scale, least) for spans, color in pauses),
            *fr.plot_curve(points, panel.color),
            *_plot_limit(panel),
        ],
        title=panel.title,
        unit=panel.unit,
        label=label if panel.limit is None else f"{label}; {panel.limit_label}",
        height_px=125,
        note="; ".join(f"{who}: {low:g} to {high:g} {panel.unit}" for who, low, high in stripes),
    )


def _plot_bands(spans: list[Interval], color: str, scale: float, least: float) -> alt.Chart:
    drawn = [(a / scale, max(b / scale, a / scale + least)) for a, b in spans]
    # A gap that no screen could show does not count.
    rows = [{"x": start, "x2": end} for start, end in join_intervals(drawn, least / 2)]
    bands: alt.Chart = fr.plot(rows).mark_rect(color=color, opacity=0.4)
    return bands.encode(x2="x2:Q", y=alt.value(0), y2=alt.value("height"))


def _plot_limit(panel: Panel) -> list[alt.Chart]:
    if panel.limit is None:
        return []
    base = fr.plot([{"y": panel.limit, "label": panel.limit_label}]).encode(x=alt.value("width"))
    return [
        base.mark_rule(color=fr.ORANGE, strokeDash=[4, 3]).encode(x2=alt.value(0)),
        fr.plot_text(base, align="right", baseline="bottom", dy=-3).encode(text="label:N"),
    ]


class Cut(NamedTuple):
    """A row length, and the share of documents that are longer; None if not counted."""

    length_tokens: int
    fraction: float | None
    is_chosen: bool
    label: str


def judge_lengths(packing: PackingRecord) -> list[Cut]:
    """Return what rows of the chosen length, and of lengths that others use, cut off."""
    histogram, chosen = packing.histogram, packing.sequence_length_tokens
    n_documents = sum(histogram.counts)
    counted = {choice.sequence_length_tokens: choice for choice in packing.choices}
    cuts = []
    for length in sorted({chosen, *LENGTHS_TO_JUDGE}):
        fraction: float | None = None
        # Known without counting: no document is longer.
        if length >= histogram.max:
            fraction = 0.0
        elif length in counted and n_documents:
            fraction = counted[length].n_over_long_documents / n_documents
        label = f"rows of {length:,}" if length == chosen else f"{length:,}"
        if fraction is not None:
            label += f": cuts {f.tenths(fraction)}" if fraction else ": cuts none"
        cuts.append(Cut(length, fraction, length == chosen, label.replace(f.NBSP, " ")))
    return cuts


def length_chart(packing: PackingRecord) -> fr.Chart:
    """Draw the histogram of document lengths, with the cuts that are where documents are."""
    histogram, chosen = packing.histogram, packing.sequence_length_tokens
    edges, counts = histogram.edges, histogram.counts
    # A cut far beyond the last document would press the bars into a corner.
    longest = max(chosen, 2 * histogram.max)
    shown = [cut for cut in judge_lengths(packing) if cut.length_tokens <= longest]
    # Bins of a geometric series need a logarithmic axis; those of a narrow range are even.
    grows = edges[0] > 0 and edges[-1] - edges[-2] > 2 * (edges[1] - edges[0])
    bars = [
        {"x": low, "x2": high, "y": n}
        for low, high, n in zip(edges, edges[1:], counts, strict=False)
    ]
    if grows:  # the empty short end would take half the width
        bars = bars[next((i for i, bar in enumerate(bars) if bar["y"]), 0) :]
    start = bars[0]["x"]
    end = max([edges[-1], *(cut.length_tokens * 1.02 for cut in shown)])
    most = max([*counts, 1])
    log: dict[str, Any] = {"type": "log", "base": 2} if grows else {}
    tokens = alt.Scale(domain=[start, end], **log)
    # Each cut has a line for its label above the bars.
    height = alt.Scale(domain=[0, most * (1.04 + 0.17 * len(shown))])
    place = math.log2 if grows else float
    center = place(start) + CENTER * (place(end) - place(start))
    n_left = sum(place(cut.length_tokens) <= center for cut in shown)

    ticks = _powers(start, end) if grows else _dozens(end)
    bar = fr.plot(bars).mark_rect(color=fr.BLUE, stroke=None, xOffset=0.5, x2Offset=-0.5)
    # Labels that run left from the right edge come first, from the outside in.
    order = [*reversed(range(n_left, len(shown))), *range(n_left)]
    cuts = [_plot_cut(shown[i], line, i >= n_left) for line, i in enumerate(order)]
    rules, texts = zip(*cuts, strict=True)
    n_documents, n_tokens = sum(counts), packing.train.n_tokens
    # Documents that are trained on several times count each time.
    documents = f"{n_documents:,} documents, including repeats and held-out ones"
    unit = f"{documents}, by tokens"
    if n_cells := n_tokens + packing.train.n_padding_tokens:
        unit += f"; rows are {f.percent(n_tokens / n_cells)} full"
    return fr.draw_chart(
        fr.x_axis(ticks, "tokens", tokens),
        fr.y_axis(fr.round_ticks(0, most, fr.N_Y_TICKS), height),
        [bar.encode(x2="x2:Q", y2=alt.datum(0)), *rules, *texts],
        title="Document length",
        unit=unit,
        label=f"Lengths of {documents}: half have at most"
        f" {histogram.p50:,} tokens, 99 % at most {histogram.p99:,}, the longest {histogram.max:,};"
        f" rows of {chosen:,} tokens",
        height_px=221,
    )


def _plot_cut(cut: Cut, line: int, to_the_left: bool) -> tuple[alt.Chart, alt.Chart]:
    top = alt.value(2 + LINE_PX * line)
    base = fr.plot([{"x": cut.length_tokens, "label": cut.label}]).encode(y=top)
    text = fr.plot_text(
        base, baseline="top", align="right" if to_the_left else "left", dx=-5 if to_the_left else 5,
        fontWeight="bold" if cut.is_chosen else "normal",
    )  # fmt: skip
    rule = base.mark_rule(color=fr.ORANGE, strokeDash=[] if cut.is_chosen else [4, 3])
    return rule.encode(y2=alt.value("height")), text.encode(text="label:N")


def _powers(start: float, end: float) -> list[float]:
    powers = [2.0**i for i in range(math.ceil(math.log2(start)), math.floor(math.log2(end)) + 1)]
    # Every k-th one; -(-n // k) rounds n / k up.
    return powers[:: -(-len(powers) // fr.N_X_TICKS)] if powers else [start]


def _dozens(end: float) -> list[float]:
    # A power of two: 128, 256, 384 are lengths that people set.
    step = 2.0 ** max(0, math.floor(math.log2(end)) - 4)
    while end / step >= fr.N_X_TICKS:
        step *= 2
    return [i * step for i in range(int(end / step) + 1)]


def make_table(cls: type[Struct], records: Sequence[Struct]) -> pd.DataFrame:
    """Return records as a table with a column for each field."""
    # Columns are named, so that a table of no records still has them.
    rows = [asdict(record) for record in records]
    return pd.DataFrame.from_records(rows, columns=cls.__struct_fields__)


def envelope(x: pd.Series, y: pd.Series, n_bins: int = N_BINS) -> pd.DataFrame:
    """Reduce a series, ordered by x, to ``n_bins`` points of equal counts; nulls are left out."""
    points = pd.DataFrame({"x": x, "y": y, "low": y, "high": y}, dtype=float).dropna()
    how = {"x": "mean", "y": "mean", "low": "min", "high": "max"}
    return points.groupby(_bins(points, n_bins)).agg(how)


def tokens_per_s(steps: pd.DataFrame) -> pd.DataFrame:
    # Tokens of a bin over its seconds: a mean of speeds would underweight slow steps.
    parts = steps.assign(took_s=durations_s(steps)).groupby(_bins(steps, N_BINS))
    seconds, clock = parts["took_s"].sum(), parts["elapsed_s"]
    points = pd.DataFrame({"x": (clock.first() + clock.last()) / 2})
    points["y"] = points["low"] = points["high"] = parts["n_tokens"].sum() / seconds
    # A bin that took no measurable time has no speed.
    return points[seconds > 0]


def durations_s(steps: pd.DataFrame) -> pd.Series:
    """Return the time from the end of one step to the end of the next, pauses included.

    If the step before is not on record (the first one, or a run that keeps one line per log
    interval), or a resumed run set its clock back, the step's own time is all that is known.
    """
    gap_s = steps["elapsed_s"].diff()
    return gap_s.where((steps["step"].diff() == 1) & (gap_s > 0), steps["step_s"])


def evaluation_spans(steps: Sequence[StepRecord], points: Sequence[EvalPoint]) -> list[Interval]:
    end_s = {step.step: step.elapsed_s for step in steps}
    if steps and steps[0].step == 1:
        before_s = sum(point.eval_s for point in points if point.step == 0)
        # The evaluation before training ends where the first step begins.
        end_s[0] = steps[0].elapsed_s - steps[0].step_s - before_s
    return [
        (end_s[point.step], end_s[point.step] + point.eval_s)
        for point in points
        if point.step in end_s
    ]


def _bins(table: pd.DataFrame, n_bins: int) -> np.ndarray:
    """Return the number of each row's bin."""
    # 7 rows, 3 bins -> 3 rows each: 0 0 0 1 1 1 2
    return np.arange(len(table)) // max(1, -(-len(table) // max(1, n_bins)))
