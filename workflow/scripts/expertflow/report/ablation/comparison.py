"""Lay the ablations of a report out for its page: verdict, waterfall, and lines of the ledger."""

from typing import Any

from expertflow.report import ablation_facts as facts
from expertflow.report.ablation import view, words
from expertflow.report.sheet import trusted
from expertflow.studies.records import AblationRecord


def comparisons(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "verdict": words.verdict(record),
            "claims": view.claim_lines(record),
            "counts": words.ledger_counts(record),
            **ladder_parts(record),
        }
        for record in facts.ablations(report)
    ]


def ladder_parts(record: AblationRecord) -> dict[str, Any]:
    from expertflow.report.ablation import waterfall as charts_waterfall

    ladders = facts.ladders(record)
    return {
        "waterfalls": [trusted(charts_waterfall.waterfall_chart(ladder)) for ladder in ladders],
        "missing_rungs": [step for ladder in ladders for step in ladder.missing],
        "no_ladder": "" if ladders else _why_no_ladder(record),
    }


def _why_no_ladder(record: AblationRecord) -> str:
    if not record.ladders:
        return "No ladder is in the lists that were run (ablation.files)."
    rungs = {name for names in record.ladders for name in names}
    reasons = [f"{bar.label}: {bar.reason}" for bar in record.bars if bar.name in rungs]
    return f"No rung was measured. {'; '.join(reasons)}"
