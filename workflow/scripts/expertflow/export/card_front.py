"""The front matter of a model card: what the hub reads of it."""

import re
from typing import Any

import yaml

from expertflow.evaluate.records import EvaluationSide
from expertflow.export.card_inputs import CardInputs
from expertflow.export.licences import hub_licence, only_licence

# Of names of files, those that the hub takes for a licence's place.
HUB_LINKS = ("LICENSE", "LICENSE.md")
NO_NAMES = ("other", "unknown", "none")


def front_matter(inputs: CardInputs, licence_files: tuple[str, ...]) -> list[str]:
    """Give the YAML block. What is not known, or not on the hub, is left out."""
    model, spec = inputs.model, inputs.spec
    licence = hub_licence(inputs.made_from)
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["expertflow", inputs.training.method, *(["demo"] if inputs.is_demo else [])],
        "model-index": [{"name": spec.expert, "results": [_result(inputs)]}],
    }
    if model.kind == "hub":
        front |= {"base_model": model.name, "base_model_relation": "finetune"}
    if licence is not None:
        front["license"] = licence
    if licence == "other":
        front |= _other_licence(only_licence(inputs.made_from), licence_files)
    if spec.hub_datasets:
        front["datasets"] = sorted(set(spec.hub_datasets.values()))
    text = yaml.safe_dump(front, sort_keys=True, allow_unicode=True, width=1000)
    return ["---", text.rstrip("\n"), "---"]


def _other_licence(only: str | None, files: tuple[str, ...]) -> dict[str, str]:
    """Name a licence that the hub does not know; the base's own text is its place."""
    if only is None:
        return {"license_name": "several-see-model-card"}
    slug = re.sub(r"[^a-z0-9.]+", "-", only).strip("-.")
    found = [name for name in HUB_LINKS if name in files]
    return {
        "license_name": slug if slug not in ("", *NO_NAMES) else "see-model-card",
        **({"license_link": found[0]} if found else {}),
    }


def _result(inputs: CardInputs) -> dict[str, Any]:
    evaluation = inputs.evaluation
    return {
        "task": {"type": "text-generation", "name": evaluation.task},
        "dataset": {
            "type": f"{inputs.spec.expert}-held-out",
            "name": f"held-out documents of {inputs.spec.expert}",
        },
        "metrics": _metrics(evaluation.after),
    }


def _metrics(side: EvaluationSide) -> list[dict[str, Any]]:
    metrics = [
        _metric("perplexity", side.perplexity, side.perplexity_ci95, n_documents=side.n_documents)
    ]
    score = side.score
    if score is not None and score.value_fraction is not None:
        metrics.insert(
            0,
            _metric(score.metric, score.value_fraction, score.ci95, n_questions=score.n_examples),
        )
    return metrics


def _metric(
    name: str, value: float, ci95: tuple[float, float] | None, **counts: int
) -> dict[str, Any]:
    """Give a metric; the hub has no field for an interval but free arguments."""
    known = {} if ci95 is None else {"ci95": [round(bound, 6) for bound in ci95]}
    return {
        "type": name,
        "name": name.replace("_", " "),
        "value": round(value, 6),
        "args": {**known, **counts},
    }
