"""Render report.html: one self-contained file, without network access or scripts.

Texts from data sets, models and manifests are untrusted: the templates escape all of them. Only the
charts are trusted; they contain numbers and this package's own texts.
"""

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


def chain_rows(chain: tuple[ChainLink, ...]) -> list[tuple[str, list[str], list[ChainLink]]]:
    """Return each stage with the stages that it read and with its records."""
    made = {name: [link for link in chain if link.stage == name] for name in STAGES}
    return [
        (name, [read for read in STAGES[name].reads.split() if made[read]], links)
        for name, links in made.items()
        if links
    ]
