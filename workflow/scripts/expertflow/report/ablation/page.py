"""Render ablation.html: what every switch is worth on this machine, beside what was claimed.

Names and sayings come from files that anybody may write: the template escapes them, and in charts
they are texts of an SVG, which are escaped as it is drawn.
"""

from expertflow.report import ablation_facts as facts
from expertflow.report import format as f
from expertflow.report.ablation import view, words
from expertflow.report.ablation.comparison import ladder_parts
from expertflow.report.sheet import N_ROWS, style, templates, trusted
from expertflow.report.view.report import METHODS
from expertflow.studies.records import PLAN, AblationRecord


def render_ablation(record: AblationRecord) -> str:
    """Render the page of an ablation.

    Raises:
        DataError: the record contradicts itself: a ladder's steps do not multiply to the whole.
    """
    # Loads altair, which takes a second.
    from expertflow.report.ablation import waterfall

    single, groups = facts.changes(record), _groups(record)
    columns, left_out = _columns(groups)
    return (
        templates()
        .get_template("ablation.html.j2")
        .render(
            style=style(),
            record=record,
            subject=_subject(record),
            verdict=words.verdict(record),
            tiles=words.tiles(record),
            **ladder_parts(record),
            changes=trusted(waterfall.changes_chart(single)),
            groups=groups,
            columns=columns,
            left_out=left_out,
            claims=view.claim_lines(record)[:N_ROWS],
            n_rows=N_ROWS,
            counts=words.ledger_counts(record),
            what_was_run=_what_was_run(record),
        )
    )


def _subject(record: AblationRecord) -> str:
    parts = [record.expert, record.model, METHODS.get(record.method, record.method)]
    return " \u00b7 ".join([*parts, f"preset {record.preset}"])


def _groups(record: AblationRecord) -> list[tuple[str, tuple[view.Line, ...]]]:
    bars = {bar.name: bar for bar in record.bars}
    found = [
        (f"ladder {names[0] if not (of := bars[names[0]].of) else of}", view.lines(
            tuple(bars[name] for name in names if name in bars and name != PLAN), record
        ))
        for names in record.ladders if names
    ]  # fmt: skip
    single = view.lines(facts.changes(record), record)
    return [*found, ("one change each", single)] if single else found


def _columns(
    groups: list[tuple[str, tuple[view.Line, ...]]],
) -> tuple[list[str], list[tuple[str, str]]]:
    measured = [line for _, lines in groups for line in lines if not line.reason]
    cells = [cell for line in measured for cell in line.cells]
    shown = list(dict.fromkeys(name for name, cell in cells if not cell.reason))
    return shown, [
        (name, cell.reason)
        for name, cell in dict(cells).items()
        if name not in shown and cell.reason
    ]


def _what_was_run(record: AblationRecord) -> list[tuple[str, str]]:
    price = record.price_usd_per_hour
    as_of = f", as of {record.price_as_of}" if record.price_as_of else ""
    return [
        ("hardware", ", ".join(
            dict.fromkeys(
                part for part in (record.gpu_name, record.machine, record.device, record.hardware)
                if part
            )
        )),
        ("model", f"{record.model}, {METHODS.get(record.method, record.method)}"),
        ("rows", f"{f.count(record.sequence_length_tokens)} tokens"),
        ("global batch", f.number_of(record.global_batch_sequences, "sequence")),
        ("repeats", f"{f.number_of(record.n_repeats, 'pair')} a variant, each taking turns with"
         " the plan"),
        ("steps", f"{f.count(record.n_timed_steps)} timed, after {f.count(record.n_warmup_steps)}"
         " to warm up that do not count"),
        ("price", "none" if price is None else f"{f.usd(price)} an hour{as_of}"),
        ("versions", ", ".join(f"{name} {text}" for name, text in record.versions.items())),
    ]  # fmt: skip
