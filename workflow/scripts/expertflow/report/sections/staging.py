"""The report's ``staging`` section: where rows and weights were read from, and why."""

from typing import Any

from expertflow.core.records import to_json
from expertflow.report.inputs import ReportInputs

NOTHING_COPIED = "nothing had to be copied: "


def staging_section(inputs: ReportInputs) -> dict[str, Any]:
    """Join what was staged before training with what training found where it ran."""
    staging = inputs.staging
    return {
        "expert": staging.expert,
        **to_json(staging.rows),
        "weights": to_json(staging.weights),
        "used": inputs.preflight.get("staging"),
    }


def staging_reasons(section: dict[str, Any]) -> dict[str, str]:
    """Say of every null in the section why it is null."""
    reasons = {"staging.used": "the preflight of this run did not note where it read from"}
    used = section["used"] or {}
    for place, note in (
        ("staging", section),
        ("staging.weights", section["weights"]),
        *((f"staging.used.{kind}", note) for kind, note in used.items()),
    ):
        idle = NOTHING_COPIED if note["target"] else ""
        reasons |= {
            f"{place}.target": note["reason"],
            f"{place}.n_bytes_copied": note["reason"],
            f"{place}.copy_bytes_per_s": f"{idle}{note['reason']}",
            f"{place}.source_file_system": f"not asked for, as {note['reason']}",
            f"{place}.source_read_bytes_per_s": note["source_read_method"],
            f"{place}.target_read_bytes_per_s": note["target_read_method"],
        }
    return reasons
