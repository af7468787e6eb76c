"""Write the model card: what the model is, what it learned from, and what it scored."""

import re
from typing import Any

import yaml

from expertflow.data.records import DatasetManifest
from expertflow.evaluate.records import EvaluationRecord
from expertflow.train.records import ModelRecord, TrainingRecord

NOT_STATED = "**not stated**"
# What the usual short names of licences say themselves: cc-by-nc-sa-4.0, odbl, gpl-3.0 …
TERMS = {
    "share-alike": re.compile(r"(?i)\bsa\b|sharealike|share-alike|\b[al]?gpl|\bodbl\b"),
    "non-commercial": re.compile(r"(?i)\bnc\b|non-?commercial"),
    "no derivatives": re.compile(r"(?i)\bnd\b|no-?derivatives"),
    "no known terms": re.compile(r"(?i)^(other|unknown)$"),
}


def card_facts(
    *,
    description: str,
    datasets: DatasetManifest,
    model: ModelRecord,
    training: TrainingRecord,
    evaluation: EvaluationRecord,
) -> dict[str, Any]:
    """Collect what a card tells from the records; the export adds its own."""
    before, after = evaluation.before, evaluation.after
    scores = [("held-out loss (nats per token)", before.held_out_loss, after.held_out_loss)]
    rows: list[tuple[str, float | None, float | None]] = [*scores]
    if before.score is not None and after.score is not None:
        name = f"{after.score.metric} ({after.score.n_examples} questions)"
        rows.append((name, before.score.value_fraction, after.score.value_fraction))
    return {
        "expert": training.expert,
        "description": description,
        "base_model": model.name,
        "base_licence": model.licence,
        "method": training.method,
        "preset": datasets.preset,
        "sources": [
            {
                "name": s.name,
                "licence": s.licence,
                "revision": s.revision,
                "n_records": s.n_records,
                "notes": list(s.notes),
            }
            for s in datasets.sources
        ],
        "scores": rows,
        "weights_sha256": training.weights_sha256,
    }


def model_card(facts: dict[str, Any]) -> str:
    """Render a card with YAML front matter from ``card_facts`` and, as ``export``, the record."""
    front = {
        "base_model": facts["base_model"],
        "library_name": "transformers",
        "tags": ["expertflow", facts["method"]],
    }
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=True, allow_unicode=True).strip(),
        "---",
        f"# {facts['expert']}",
        "",
        facts["description"],
        "",
        *_preset_note(facts["preset"]),
        f"- Base model: {facts['base_model']} (licence: {facts['base_licence'] or 'not stated'})",
        f"- Method: {facts['method']}",
        f"- Trained weights (SHA-256): `{facts['weights_sha256']}`",
        *_merge_lines(facts["export"]),
        "",
        "## Data",
        "",
        "| source | licence | records | revision |",
        "|---|---|---|---|",
        *map(_source_row, facts["sources"]),
        "",
        *licence_lines(facts["sources"]),
        "## Evaluation on held-out documents",
        "",
        *_base_note(facts["method"]),
        "| | before | after |",
        "|---|---|---|",
        *(f"| {name} | {_show(before)} | {_show(after)} |"
          for name, before, after in facts["scores"]),
        "",
        "## Load",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("merged")',
        'tokenizer = AutoTokenizer.from_pretrained("merged")',
        "```",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def licence_lines(sources: list[dict[str, Any]]) -> list[str]:
    """Point out what a reader of the table of sources should not miss, from the names alone."""
    lines = [
        f"- {source['name']}: {note}" for source in sources for note in source.get("notes", ())
    ]
    unstated = [source["name"] for source in sources if source["licence"] is None]
    if unstated:
        lines.append(f"- No licence is stated for: {', '.join(unstated)}.")
    for term, pattern in TERMS.items():
        named = [
            f"{source['name']} ({source['licence']})"
            for source in sources
            if any(pattern.search(part) for part in _parts(source["licence"]))
        ]
        if named:
            lines.append(f"- Licence named as {term}: {', '.join(named)}.")
    if len({tuple(sorted(_parts(source["licence"]))) for source in sources}) > 1:
        lines.append("- The sources do not share one licence; the table lists each.")
    return [*lines, ""] if lines else []


def _parts(licence: str | None) -> list[str]:
    """Cut a text that names several licences; equal names in any case count as one."""
    return [part.strip().casefold() for part in (licence or "").split(",") if part.strip()]


def _source_row(source: dict[str, Any]) -> str:
    n_records = source.get("n_records")
    cells = (
        source["name"],
        source["licence"] or NOT_STATED,
        "-" if n_records is None else f"{n_records:,}",
        source["revision"] or "-",
    )
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _merge_lines(export: dict[str, Any]) -> list[str]:
    """Say what the adapter was merged into, and that the files say what the trained model says."""
    into = {
        None: "trained as a whole",
        "base": "adapter merged into the base model",
        "dequantised base": "adapter merged into the base model as its 4 bits hold it, dequantised",
    }[export["merged_into"]]
    before, after = export["loss_before_merge"], export["loss_after_merge"]
    return [
        f"- Weights in this folder: {into}; {export['dtype']}",
        f"- Held-out loss of the trained model and of these files: {before:.6g} and {after:.6g}"
        f" ({export['n_rows_compared']} rows)",
    ]


def _base_note(method: str) -> list[str]:
    if method != "qlora":
        return []
    return ["Before and after are both scored on the base in 4 bits, as it was trained on.", ""]


def _preset_note(preset: str) -> list[str]:
    if preset != "demo":
        return []
    return ["Made by the demo preset: a small random model on generated data, not for use.", ""]


def _show(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
