"""Write the model card from a template; values are escaped unless marked as Markdown."""

import html
import json
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from msgspec.structs import asdict

from expertflow.core.errors import single_line
from expertflow.core.format import show_hidden
from expertflow.core.records import Record
from expertflow.data.records import DatasetManifest
from expertflow.evaluate.records import Decoding, EvaluationRecord
from expertflow.export import licenses
from expertflow.export.records import ExportRecord, ExportSpec, MergeComparison
from expertflow.hardware.records import MonitorRecord
from expertflow.plan.cost import round_up_hours
from expertflow.plan.records import TrainPlan
from expertflow.train.records import ModelRecord, TrainingRecord

TEMPLATE = Path(__file__).with_name("card.md.j2")
# Maximum length of the held-out question on the card.
MAX_QUESTION_CHARACTERS = 600
# File names that the hub accepts as a link to a license.
HUB_LINKS = ("LICENSE", "LICENSE.md")
NO_NAMES = ("", "other", "unknown", "none")
_MARKUP = re.compile(r"([\\`*_\[\]{}|~#!$])")
# Begins a list, a quote, a heading or a rule.
_OPENING = re.compile(r"^(?:([-+=>])|(\d+)([.)]))")


class Markdown(str):
    """Text that is already Markdown and is not escaped."""

    __slots__ = ()


class CardInputs(Record, frozen=True, kw_only=True):
    spec: ExportSpec
    datasets: DatasetManifest
    model: ModelRecord
    plan: TrainPlan
    training: TrainingRecord
    monitor: MonitorRecord
    evaluation: EvaluationRecord
    code: str

    @property
    def base_name(self) -> str:
        """The base model's name; for a local folder its last part, as paths differ elsewhere."""
        return Path(self.model.name).name if self.model.kind == "local" else self.model.name

    @property
    def made_from(self) -> list[licenses.Licensed]:
        base = licenses.Licensed(name=self.base_name, license=self.model.license, is_base=True)
        sources = (licenses.Licensed(name=s.name, license=s.license) for s in self.datasets.sources)
        return [base, *sources]

    @property
    def is_demo(self) -> bool:
        return self.datasets.preset == "demo"


def model_card(
    inputs: CardInputs,
    record: ExportRecord,
    comparison: MergeComparison,
    license_files: tuple[str, ...] = (),
    is_adapter: bool = False,
) -> str:
    """Render a card with YAML front matter for the merged model, or for the adapter alone.

    ``license_files`` are the base's.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markdown) else escape_text(value),
    )
    environment.filters |= {
        "code": escape_code,
        "digits": lambda value: "not measured" if value is None else f"{value:.4g}",
        "json_literal": lambda value: Markdown(json.dumps(value)),
        "markdown": Markdown,
        "paragraph": escape_paragraph,
        # JSON escapes an emoji as a surrogate pair, which Python does not join.
        "python_literal": lambda value: Markdown(ascii(value)),
    }
    hours, world_size = inputs.training.time.wall_s / 3600, inputs.training.world_size
    energy = "energy_all_j" if world_size > 1 else "energy_j"
    body = environment.get_template(TEMPLATE.name).render(
        **asdict(inputs),
        **_question(inputs),
        record=record,
        is_adapter=is_adapter,
        comparison=comparison,
        is_demo=inputs.is_demo,
        base_name=inputs.base_name,
        conflicts=licenses.find_conflicts(inputs.made_from),
        vllm_settings=vllm_settings(inputs.spec.decoding),
        hours=hours,
        energy_j=getattr(inputs.monitor, energy),
        energy_reason=inputs.monitor.unavailable.get(energy, "the monitor did not record it"),
        billed_hours=round_up_hours(hours, inputs.plan.cost.billing_minutes),
    )
    front = front_matter(inputs, license_files, is_adapter=is_adapter)
    # Skipped template blocks leave blank lines behind.
    return f"---\n{front}\n---\n" + re.sub(r"\n{3,}", "\n\n", body).lstrip("\n")


def escape_text(value: object) -> Markdown:
    return Markdown(_MARKUP.sub(r"\\\1", html.escape(single_line(value), quote=False)))


def escape_paragraph(value: object) -> Markdown:
    text = _OPENING.sub(lambda m: f"\\{m[1]}" if m[1] else f"{m[2]}\\{m[3]}", escape_text(value))
    return Markdown(text)


def escape_code(value: object) -> Markdown:
    line = single_line(value)
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence, blank = "`" * (longest + 1), " " if longest else ""
    # A pipe ends a table cell even inside code.
    return Markdown(f"{fence}{blank}{line}{blank}{fence}".replace("|", "\\|"))


def vllm_settings(decoding: Decoding) -> dict[str, float | int]:
    if decoding.temperature == 0:
        return {"temperature": 0}
    settings = {"temperature": decoding.temperature, "top_p": decoding.top_p}
    return settings | ({"top_k": decoding.top_k} if decoding.top_k else {})


def front_matter(inputs: CardInputs, license_files: tuple[str, ...], *, is_adapter: bool) -> str:
    """Return the hub's YAML, omitting what is unknown or not on the hub."""
    model, made_from = inputs.model, inputs.made_from
    relation = "adapter" if is_adapter else "finetune"
    license = licenses.hub_license(made_from)
    name, link = None, None
    if license == "other":
        name = "several-see-model-card"
        if (only := licenses.only_license(made_from)) is not None:
            slug = re.sub(r"[^a-z0-9.]+", "-", only).strip("-.")
            name = "see-model-card" if slug in NO_NAMES else slug
            link = next((file for file in HUB_LINKS if file in license_files), None)
    data = ModelCardData(
        base_model=model.name if model.kind == "hub" else None,
        base_model_relation=relation if model.kind == "hub" else None,
        datasets=sorted(set(inputs.spec.hub_datasets.values())) or None,
        eval_results=_eval_results(inputs),
        library_name="peft" if is_adapter else "transformers",
        license=license,
        license_name=name,
        license_link=link,
        model_name=inputs.spec.expert,
        pipeline_tag="text-generation",
        tags=["expertflow", inputs.training.method, *(["demo"] if inputs.is_demo else [])],
    )
    return show_hidden(data.to_yaml(line_break="\n"))


def _eval_results(inputs: CardInputs) -> list[EvalResult]:
    side, expert = inputs.evaluation.after, inputs.spec.expert
    found = [("perplexity", side.perplexity, side.perplexity_ci95, "documents", side.n_documents)]
    if (score := side.score) is not None and score.value_fraction is not None:
        own = (score.metric, score.value_fraction, score.ci95, "questions", score.n_examples)
        found.insert(0, own)
    return [
        EvalResult(
            task_type="text-generation",
            task_name=inputs.evaluation.task,
            dataset_type=f"{expert}-held-out",
            dataset_name=f"held-out documents of {expert}",
            metric_type=metric,
            metric_name=metric.replace("_", " "),
            metric_value=round(value, 6),
            # The hub has no field for an interval.
            metric_args=({"ci95": [round(x, 6) for x in ci95]} if ci95 else {}) | {f"n_{what}": n},
        )
        for metric, value, ci95, what, n in found
    ]


def _question(inputs: CardInputs) -> dict[str, object]:
    """Return a held-out question, since an expert answers best what resembles its data."""
    samples, system = inputs.evaluation.samples, inputs.spec.system_prompt
    question = samples[0].prompt if samples else ""
    if system is not None:
        question = question.removeprefix(system.strip()).strip()
    cut = ""
    if len(question) > MAX_QUESTION_CHARACTERS:
        question = question[:MAX_QUESTION_CHARACTERS]
        cut = f" (its first {MAX_QUESTION_CHARACTERS} characters)"
    # Lines indented by four spaces cannot end the block or become markup.
    lines = [show_hidden(line) for line in question.replace("\t", "    ").splitlines()]
    return {"question_lines": lines, "question_cut": cut}
