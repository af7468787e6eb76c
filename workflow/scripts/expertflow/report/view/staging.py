"""Say in a line each where rows and weights were read from, and why."""

from typing import Any

from expertflow.report import format as f

Report = dict[str, Any]
ACTIONS = {
    "read_in_place": "in place",
    "pre_read": "in place, read into memory beforehand",
    "copied": "copied by training",
    "reused": "a copy that was there, verified",
}


def staging(report: Report) -> list[tuple[str, str]]:
    section = report["staging"]
    planned = {"rows": section, "weights": section["weights"]}
    notes = planned if section["used"] is None else section["used"]
    return [
        (f"{kind} read from", _words(note, planned[kind])) for kind, note in sorted(notes.items())
    ]


def _words(note: dict[str, Any], planned: dict[str, Any]) -> str:
    place = note["target"] or note["source"]
    action = "a fallback" if note["is_fallback"] else ACTIONS.get(note["action"], note["action"])
    facts = [f.size(note["n_bytes"]), action]
    speed = note["copy_bytes_per_s"] or (planned["copy_bytes_per_s"] if note["target"] else None)
    if speed is not None:
        facts.append(f"copied at {f.size(speed)}/s")
    return f"{place} ({', '.join(facts)}): {note['reason']}"
