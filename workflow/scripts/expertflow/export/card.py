"""Write the model card: what the model is, what it learned from, and what it scored."""

from expertflow.export.card_front import front_matter
from expertflow.export.card_inputs import CardInputs, Exported
from expertflow.export.card_run import cost_lines, data_lines, provenance_lines, settings_lines
from expertflow.export.card_scores import published_lines, score_lines
from expertflow.export.card_text import code, paragraph, plain
from expertflow.export.card_use import use_lines
from expertflow.export.licences import conflicts

INTO = {
    None: "trained as a whole",
    "base": "adapter merged into the base model",
    "dequantised base": "adapter merged into the base model as its 4 bits hold it, dequantised",
}


def model_card(inputs: CardInputs, exported: Exported) -> str:
    """Render a card, with YAML front matter, from the records of a run."""
    lines = [
        *front_matter(inputs, exported.licence_files),
        *_warnings(inputs),
        f"# {plain(inputs.spec.expert)}",
        "",
        paragraph(inputs.spec.description),
        "",
        *_model_lines(inputs, exported),
        "",
        *data_lines(inputs),
        *settings_lines(inputs),
        *score_lines(inputs.evaluation, method=inputs.training.method),
        *cost_lines(inputs),
        *provenance_lines(inputs, weights_sha256=exported.record.weights_sha256),
        *use_lines(inputs, exported),
        *_limits(inputs),
    ]
    return "\n".join(lines)


def _warnings(inputs: CardInputs) -> list[str]:
    """Put first what stands against using the model at all."""
    lines = []
    if inputs.is_demo:
        lines += [
            "> **Not for use.** Made by the demo preset: a small random model on generated data.",
            "",
        ]
    if found := conflicts(inputs.made_from):
        lines += [
            "> **Licences: read this before use.** Read off their names; not legal advice.",
            ">",
            *(f"> - {plain(line)}" for line in found),
            "",
        ]
    return lines


def _model_lines(inputs: CardInputs, exported: Exported) -> list[str]:
    model, record, comparison = inputs.model, exported.record, exported.comparison
    revision = f", revision {code(model.revision)}" if model.revision else ""
    licence = plain(model.licence) if model.licence else "**not stated**"
    merged = (
        f"held-out loss of the trained model {comparison.loss_before:.6g}, of these files"
        f" {comparison.loss_after:.6g} nats a token ({comparison.n_rows} rows,"
        f" {comparison.n_targets:,} tokens; {comparison.allowed_loss_difference:.2g} apart would"
        f" have been refused); logits differ by {comparison.max_logit_difference:.2g} at most"
    )
    lines = [
        "## Model",
        "",
        f"- Base model: {plain(model.name)}{revision}, licence {licence}",
        f"- Parameters: {inputs.training.n_params_total:,}, trained"
        f" {inputs.training.n_params_trainable:,}",
        f"- Weights in this folder: {INTO[record.merged_into]}; {record.dtype},"
        f" {record.n_bytes / 1e6:,.1f} MB",
        f"- Merge: {merged}",
    ]
    return [*lines, *published_lines(inputs.evaluation.published)]


def _limits(inputs: CardInputs) -> list[str]:
    return [
        "## Limits",
        "",
        "- The scores hold for held-out documents of the data above; they say nothing about other"
        " inputs, nor about safety.",
        "- The language of the data was not determined.",
        *(
            ["- The code that it writes was scored by running it; that does not make it safe to"
             " run."]
            if inputs.evaluation.task in ("sql_execution", "typescript", "typescript_tests")
            else []
        ),
        "",
    ]  # fmt: skip
