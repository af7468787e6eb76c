"""Choose what each chart shows: numbers and labels, without a word on how they are drawn."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec.structs import replace

from expertflow.core.records import Record
from expertflow.report import format as f
from expertflow.report.charts import series
from expertflow.report.charts.series import Point, Span
from expertflow.report.inputs import ReportInputs
from expertflow.report.records import Report
from expertflow.report.run_records import ReferenceBand
from expertflow.tokens.records import PackingRecord

Color = Literal["blue", "green", "orange", "purple"]

GB = 1e-9
LENGTHS_TO_JUDGE = (1536, 2048)  # what the set-ups that this replaces cut documents to


class Mark(Record, frozen=True, kw_only=True):
    x: float
    y: float


class LossData(Record, frozen=True, kw_only=True):
    train: tuple[Point, ...]
    held_out: tuple[Mark, ...]
    last_step: int
    label: str


class Stripe(Record, frozen=True, kw_only=True):
    """A band of values that others call normal; for reference, not a bar to pass."""

    low: float
    high: float
    label: str


class Panel(Record, frozen=True, kw_only=True):
    """One quantity over time. ``limit`` is drawn as a dashed line with its label.

    The axis reaches from ``bottom`` to ``top`` or to the greatest value, whichever is more.
    """

    quantity: str
    title: str
    unit: str
    color: Color
    points: tuple[Point, ...]
    bottom: float = 0.0
    top: float | None = None
    limit: float | None = None
    limit_label: str = ""
    reference: tuple[Stripe, ...] = ()
    label: str = ""


class TimelineData(Record, frozen=True, kw_only=True):
    panels: tuple[Panel, ...]
    saves: tuple[Span, ...]
    evaluations: tuple[Span, ...]
    end_s: float


class Cut(Record, frozen=True, kw_only=True):
    """A row length, and the share of documents that are longer; null where nobody counted."""

    length_tokens: int
    cut_fraction: float | None
    is_chosen: bool
    label: str


class LengthData(Record, frozen=True, kw_only=True):
    """Document lengths: ``counts[i]`` lie in [edges[i], edges[i + 1]).

    ``cuts`` are all lengths to judge, ``shown`` those that lie where documents are.
    """

    edges: tuple[int, ...]
    counts: tuple[int, ...]
    fill_fraction: float | None
    cuts: tuple[Cut, ...]
    shown: tuple[Cut, ...]
    label: str


class ChartData(Record, frozen=True, kw_only=True):
    loss: LossData | None
    timeline: TimelineData | None
    lengths: LengthData


def chart_data(report: Report, inputs: ReportInputs) -> ChartData:
    return ChartData(
        loss=_loss(inputs), timeline=_timeline(report, inputs), lengths=_lengths(inputs.packing)
    )


def _loss(inputs: ReportInputs) -> LossData | None:
    points = series.envelope((step.step, step.loss) for step in inputs.steps)
    if not points:
        return None
    held_out = tuple(Mark(x=p.step, y=p.loss) for p in inputs.training.eval_points)
    label = f"Training loss from {f.loss(points[0].y)} to {f.loss(points[-1].y)} nats a token"
    if held_out:
        label += f", held-out loss from {f.loss(held_out[0].y)} to {f.loss(held_out[-1].y)}"
    last_step = inputs.steps[-1].step
    return LossData(
        train=tuple(points), held_out=held_out, last_step=last_step,
        label=f"{label}, over {last_step:,} steps",
    )  # fmt: skip


def _timeline(report: Report, inputs: ReportInputs) -> TimelineData | None:
    panels = [panel for panel in _panels(inputs) if panel.points]
    if not panels:
        return None
    bands = report.training_report.hardware.reference_bands
    saves = [
        Span(start_s=p.elapsed_s, end_s=p.elapsed_s + p.save_s) for p in inputs.training.save_points
    ]
    evaluations = series.evaluation_spans(inputs.steps, inputs.training.eval_points)
    ends_s = [panel.points[-1].x for panel in panels]
    end_s = max(ends_s + [span.end_s for span in (*saves, *evaluations)])
    return TimelineData(
        panels=tuple(_complete(panel, bands, end_s) for panel in panels),
        saves=tuple(saves), evaluations=tuple(evaluations), end_s=end_s,
    )  # fmt: skip


def _panels(inputs: ReportInputs) -> list[Panel]:
    monitor = inputs.monitor
    total_gb = None if monitor.memory_total_bytes is None else monitor.memory_total_bytes * GB
    slow_c = (monitor.temperature_limits_c or {}).get("slowdown")

    def panel(quantity: str, field: str, *about: Any, scale: float = 1.0, **more: Any) -> Panel:
        title, unit, color = about
        readings = ((sample.elapsed_s, getattr(sample, field)) for sample in inputs.samples)
        points = series.envelope((x, None if y is None else y * scale) for x, y in readings)
        return Panel(quantity=quantity, title=title, unit=unit, color=color, points=tuple(points),
                     **more)  # fmt: skip

    return [
        Panel(quantity="useful_tokens_per_s", title="Useful tokens per second", unit="tok/s",
              color="blue", points=tuple(series.tokens_per_s(inputs.steps))),
        panel("tensor_active_percent", "tensor_active_percent", "Tensor cores active", "%",
              "green", top=100.0),
        panel("sm_active_percent", "sm_active_percent", "SMs active", "%", "green", top=100.0),
        panel("any_kernel_percent", "utilization_percent", "Any kernel running", "%", "green",
              top=100.0),
        panel("power_w", "power_w", "Power", "W", "orange",
              limit=monitor.power_limit_w, limit_label=f"limit {monitor.power_limit_w or 0:.0f} W"),
        panel("memory_used_bytes", "memory_used_bytes", "GPU memory in use", "GB", "purple",
              scale=GB, limit=total_gb, limit_label=f"{total_gb or 0:.3g} GB in all"),
        panel("temperature_c", "temperature_c", "GPU temperature", "°C", "orange", bottom=20.0,
              limit=slow_c, limit_label=f"slow-down {slow_c or 0:.0f} °C"),
        panel("cpu_percent", "cpu_percent", "CPU", "% of all cores", "green", top=100.0),
        panel("ram_used_bytes", "ram_used_bytes", "Host memory in use", "GB", "purple", scale=GB),
    ]  # fmt: skip


def _complete(panel: Panel, bands: Sequence[ReferenceBand], end_s: float) -> Panel:
    stripes = tuple(
        Stripe(low=band.low * scale, high=band.high * scale, label=band.system)
        for band in bands
        if band.quantity == panel.quantity
        for scale in [GB if band.unit == "bytes" else 1.0]
    )
    mean = sum(point.y for point in panel.points) / len(panel.points)
    low, high = min(p.low for p in panel.points), max(p.high for p in panel.points)
    label = (
        f"{panel.title} in {panel.unit} over {f.duration(end_s)}: mean {f.short(mean)}, "
        f"from {f.short(low)} to {f.short(high)}"
    )
    if panel.limit is not None:
        label += f"; {panel.limit_label}"
    return replace(panel, reference=stripes, label=label)


def _lengths(packing: PackingRecord) -> LengthData:
    histogram, chosen = packing.histogram, packing.sequence_length_tokens
    rows, n_cells = packing.train, packing.train.n_tokens + packing.train.n_padding_tokens
    n_documents = sum(histogram.counts)
    counted = {choice.sequence_length_tokens: choice for choice in packing.choices}

    def cut(length: int) -> Cut:
        fraction: float | None = None
        if length >= histogram.max:
            fraction = 0.0
        elif length in counted and n_documents:
            fraction = counted[length].n_over_long_documents / n_documents
        label = f"rows of {length:,}" if length == chosen else f"{length:,}"
        if fraction is not None:
            show = f.tenths if fraction >= 5e-4 else f.percent
            label += f": cuts {show(fraction)}" if fraction else ": cuts none"
        return Cut(
            length_tokens=length,
            cut_fraction=fraction,
            is_chosen=length == chosen,
            label=label.replace(f.NBSP, " "),
        )

    cuts = tuple(cut(length) for length in sorted({chosen, *LENGTHS_TO_JUDGE}))
    end = max(chosen, 2 * histogram.max)
    return LengthData(
        edges=histogram.edges,
        counts=histogram.counts,
        fill_fraction=rows.n_tokens / n_cells if n_cells else None,
        cuts=cuts,
        shown=tuple(each for each in cuts if each.length_tokens <= end),
        label=f"Lengths of {n_documents:,} documents: half have at most {histogram.p50:,} tokens,"
        f" 99 % at most {histogram.p99:,}, the longest {histogram.max:,};"
        f" rows of {chosen:,} tokens",
    )
