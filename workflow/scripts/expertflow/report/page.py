"""Render report.html: one self-contained file, without network access or scripts.

Texts from data sets, models and manifests are untrusted: the templates escape all of them. Only the
charts are trusted; they contain numbers and this package's own texts.
"""

from typing import NamedTuple

from expertflow.chain import STAGES
from expertflow.report import learned
from expertflow.report.ablation_page import show_comparison
from expertflow.report.bill import draw_bill
from expertflow.report.compare import COLORS
from expertflow.report.headline import describe_subject, make_tiles
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import Missing, is_measured
from expertflow.report.records import ChainLink, Evaluation, Report
from expertflow.report.run_records import Time
from expertflow.report.sheet import render

N_EPOCHS = 8
N_RECORDS = 3  # of one stage; report.json has all


def render_page(report: Report, inputs: ReportInputs) -> str:
    from expertflow.report.charts import drawing as charts  # loads altair, which takes a second

    evaluation, hardware = report.evaluation, report.training_report.hardware
    epochs = list(report.training_report.training.epoch_summaries)
    if len(epochs) > N_EPOCHS:  # the middle of many epochs adds little
        epochs = [*epochs[:3], *epochs[3 - N_EPOCHS :]]
    return render(
        "page.html.j2",
        report=report,
        subject=describe_subject(report),
        tiles=make_tiles(report),
        bill_rows=draw_bill(report.bill, inputs) if report.bill else [],
        time_parts=_time_parts(report.time),
        chain=chain_rows(report.provenance.chain),
        epochs=epochs,
        deciding=learned.deciding_change(evaluation),
        metric_change=learned.metric_change(evaluation),
        loss_change=learned.loss_change(evaluation),
        best=learned.best_baseline(evaluation),
        errors=learned.count_errors(evaluation),
        colors=COLORS,
        kinds=_kinds(evaluation),
        left_out=_left_out(evaluation),
        loss_chart=charts.loss_chart(inputs),
        timeline=charts.timeline_charts(inputs, hardware.reference_bands),
        length_chart=charts.length_chart(inputs.packing),
        cuts=charts.judge_lengths(inputs.packing),
        comparisons=[show_comparison(record) for record in report.comparison],
    )


def _time_parts(time: Time) -> list[tuple[str, str, float]]:
    """Return wall time as (label, color, seconds), without copies that are part of ``train_s``."""
    steps: list[tuple[str, str, float | None]] = [("Training steps", "blue", time.train_s)]
    if is_measured(time.optimizer_s) and is_measured(time.forward_s):
        steps = [
            ("Forward and backward", "blue", time.train_s - time.optimizer_s),
            ("Optimizer", "green", time.optimizer_s),
        ]
    steps += [
        ("Waiting for data", "orange", time.data_wait_s),
        ("Copies to the GPU", "red", time.h2d_s),
        ("Checkpoints", "yellow", time.checkpoint_s),
        ("Evaluation", "purple", time.eval_s),
        ("Startup and model load", "gray", time.startup_s),
        ("Other", "faint", time.other_s),
    ]
    # Parts that took no time, or were not timed, are not in the bar.
    return [(label, color, seconds) for label, color, seconds in steps if seconds]


def _kinds(evaluation: Evaluation) -> list[str]:
    """Return the kinds of verdicts, right answers first, then by frequency."""
    before, after = evaluation.before.n_by_kind or {}, evaluation.after.n_by_kind or {}
    # A kind that only the untrained model had still gets a row.
    return sorted({*before, *after}, key=lambda k: (k != "correct", -after.get(k, 0), k))


def _left_out(evaluation: Evaluation) -> list[tuple[str, str]]:
    """List the parts that are unexpectedly missing, without those that nobody requested."""
    score = evaluation.after.value_fraction
    unscored = score.reason if isinstance(score, Missing) else None
    parts = ["baselines", "judge", "lm_eval"]
    if evaluation.task == "held_out_loss":
        parts.remove("baselines")  # there are never any
    # A reason that names a setting is a choice: evaluation.judge is not set.
    return [
        (part, why)
        for part in parts
        if (why := evaluation.unavailable.get(part))
        and why != unscored
        and not why.startswith("evaluation.")
    ]


class ChainBox(NamedTuple):
    """A stage and its first records; ``n_more`` are not shown."""

    stage: str
    made: list[ChainLink]
    n_more: int


Boxes = tuple[ChainBox | None, ...]


def chain_rows(chain: tuple[ChainLink, ...]) -> list[tuple[Boxes, str]]:
    """Arrange records in rows of boxes, made from those above, and name the lines to these."""
    # Keys are values of Stage.side; unpacked below in this order.
    columns: dict[str, list[ChainBox]] = {"documents": [], "tokens": [], "": []}
    # Sources are fetched or generated: one box.
    groups = [("fetch_source", "generate_source"), *((name,) for name in list(STAGES)[2:])]
    for names in groups:
        if found := [item for item in chain if item.stage in names]:
            label = ", ".join(dict.fromkeys(item.stage for item in found))
            box = ChainBox(label, found[:N_RECORDS], max(0, len(found) - N_RECORDS))
            columns[STAGES[names[0]].side].append(box)
    left, right, trunk = columns.values()
    height = max(len(left), len(right))
    # Left a, b and right c -> rows (a, -), (b, c): both columns end at packing below.
    sides = ([*[None] * (height - len(boxes)), *boxes] for boxes in (left, right))
    placed = [*zip(*sides, strict=True), *((box,) for box in trunk)]
    # Each row with the one above it; the last has none below.
    above = [(), *placed]
    return [(boxes, _link(a, boxes)) for a, boxes in zip(above, placed, strict=False)]


def _link(above: Boxes, boxes: Boxes) -> str:
    if not above or len(above) == len(boxes) == 1:
        return "straight" if above else ""
    if len(boxes) == 1:
        return "join" if all(above) else "left" if above[0] else "right"
    # Two columns below two: a line down each side that continues.
    lines = [name for name, a, b in zip(("left", "right"), above, boxes, strict=True) if a and b]
    right = STAGES[boxes[1].stage] if boxes[1] else None
    # The right box reads the left one above, too: a line across.
    if above[0] and right and above[0].stage in right.reads.split():
        lines.append("elbow")
    return " ".join(lines)
