"""Write the model card: what the model is, what it learned from, and what it scored."""

from typing import Any

import yaml

from expertflow.data.records import DatasetManifest
from expertflow.evaluate.records import EvaluationRecord
from expertflow.train.records import ModelRecord, TrainingRecord


def card_facts(
    *,
    description: str,
    datasets: DatasetManifest,
    model: ModelRecord,
    training: TrainingRecord,
    evaluation: EvaluationRecord,
) -> dict[str, Any]:
    """Collect what a card tells from the records."""
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
            {"name": s.name, "licence": s.licence, "revision": s.revision} for s in datasets.sources
        ],
        "scores": rows,
        "weights_sha256": training.weights_sha256,
    }


def model_card(facts: dict[str, Any]) -> str:
    """Render a card with YAML front matter from ``card_facts``."""
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
        "",
        "## Data",
        "",
        "| source | licence | revision |",
        "|---|---|---|",
        *(f"| {s['name']} | {s['licence'] or 'not stated'} | {s['revision'] or '-'} |"
          for s in facts["sources"]),
        "",
        "## Evaluation on held-out documents",
        "",
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


def _preset_note(preset: str) -> list[str]:
    if preset != "demo":
        return []
    return ["Made by the demo preset: a small random model on generated data, not for use.", ""]


def _show(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
