"""Cut an expert's settings into one spec per rule: what the rule uses, and nothing more.

A rule reruns when its spec changes, so a setting belongs into the spec of the first rule that reads
it and into no other.
"""

import contextlib
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import ConfigError
from expertflow.core.records import from_json
from expertflow.core.settings import neutralize, without_auto
from expertflow.data.settings import (
    BenchmarkSpec,
    DeduplicateSpec,
    FetchSpec,
    NearSpec,
    PrepareSpec,
    SignatureSpec,
    SourceSpec,
    category_name,
)
from expertflow.evaluate.records import EvaluationSpec
from expertflow.export.records import ExportSpec
from expertflow.plan.records import Claim, HardwareChoice, Origin, PlanSpec
from expertflow.plan.settings import Training, TrainingSection
from expertflow.report.records import AcceptanceRule, ReportSpec
from expertflow.staging.records import StageSpec
from expertflow.tokens.records import PackingSpec, TokenSpec
from expertflow.train.records import ModelSpec

Settings = dict[str, Any]
# Of a row of prices, what a plan reads.
PRICE_KEYS = ("usd_per_hour", "as_of", "billing_minutes", "storage_usd_per_hour")


def source_specs(expert: Settings) -> tuple[SourceSpec, ...]:
    """Give the sources as the data stages know them."""
    return tuple(from_json(SourceSpec, source, where="sources") for source in expert["sources"])


def fetch_spec(source: SourceSpec, *, preset: str) -> FetchSpec:
    """Keep what decides which records there are; how they are rendered comes later."""
    decides = ("name", "kind", "n_shards", "path", "id", "revision", "config", "split")
    made = ("generator", "n_documents", "seed", "options")
    kept = SourceSpec(**{key: getattr(source, key) for key in (*decides, *made)})
    return FetchSpec(source=kept, preset=preset)


def prepare_spec(expert: Settings, source: SourceSpec, content: dict[str, str]) -> PrepareSpec:
    """Give the settings of ``prepare_shard`` for one source; ``content`` hashes the benchmarks."""
    data = expert["data"]
    near = _near(data)
    return PrepareSpec(
        source=replace(
            source,
            seed=None,
            n_documents=None,
            licence=None,
            n_shards=None,
            weight=1.0,
            max_documents=None,
        ),
        system_prompt=data["system_prompt"],
        supervise=data["supervise"],
        evaluation_fields=tuple(sorted(set(expert["evaluation"]["fields"].values()))),
        on_reject=data["on_reject"],
        near=near and SignatureSpec(n_words=near.n_words, n_permutations=near.n_permutations),
        benchmarks=tuple(_benchmark(benchmark, content) for benchmark in data["benchmarks"]),
    )


def deduplicate_spec(expert: Settings) -> DeduplicateSpec:
    """Give the settings of ``deduplicate_documents``."""
    data = expert["data"]
    sources = source_specs(expert)
    cap = data["max_per_category"]
    return DeduplicateSpec(
        eval_fraction=data["eval_fraction"],
        max_documents=data["max_documents"],
        seed=data["seed"],
        max_rejected_fraction=data["max_rejected_fraction"],
        near=_near(data),
        weights={s.name: s.weight for s in sources if s.weight != 1.0},
        max_per_source={s.name: s.max_documents for s in sources if s.max_documents is not None},
        max_per_category=cap if isinstance(cap, int) else None,
        category_caps={category_name(key): n for key, n in cap.items()}
        if isinstance(cap, dict)
        else {},
    )


def _benchmark(settings: Settings, content: dict[str, str]) -> BenchmarkSpec:
    """Pin a benchmark's content, which is listed under the path's one plain spelling."""
    sha256 = content.get(str(Path(settings["path"])))
    if sha256 is None:
        raise ConfigError(
            f"data.benchmarks names {settings['path']}, which is not there; correct the path"
        )
    return BenchmarkSpec(**settings, sha256=sha256)


def _near(data: Settings) -> NearSpec | None:
    near = data["near_duplicates"]
    return None if near is None else NearSpec(**near)


def model_spec(expert: Settings, content: dict[str, str]) -> ModelSpec:
    """Give the settings of ``prepare_model``; ``content`` holds the hashes of local files."""
    return ModelSpec(
        model=expert["model"],
        revision=expert["model_revision"],
        licence=expert["model_licence"],
        tokenizer=expert["tokenizer"],
        chat_template=expert["data"]["chat_template"],
        text_special_tokens=expert["data"]["text_special_tokens"],
        seed=expert["training"]["seed"],
        content=content,
        **expert["builtin"],
    )


def token_spec(expert: Settings) -> TokenSpec:
    """Give the settings of ``pretokenize_shard``, with the versions of the engines there are."""
    versions = {}
    for engine in ("fastokens", "tokenizers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[engine] = metadata.version(engine)
    return TokenSpec(engine=expert["data"]["token_engine"], versions=versions)


def packing_spec(expert: Settings) -> PackingSpec:
    """Give the settings of ``pack_sequences``."""
    training = expert["training"]
    return PackingSpec(
        sequence_length_tokens=without_auto(training["max_seq_length"]),
        packing=training["packing"],
        overflow=training["overflow"],
        seed=training["seed"],
        max_rejected_fraction=expert["data"]["max_rejected_fraction"],
    )


def plan_spec(
    expert: Settings,
    *,
    hardware: str,
    gpu_table: list[Settings],
    prices: dict[str, Settings],
    price: tuple[float | None, str | None],
    billing_minutes: float | None,
    compare: list[Settings],
    may_drop_budgets: bool,
) -> PlanSpec:
    """Give the settings of ``plan_training``.

    Of the tables it takes the rows of the card that is named and of those to compare it with, or
    all while the card is not known yet. ``price`` is the one of the configuration, which wins over
    ``prices``.
    """
    training = without_auto(expert["training"])
    if training["method"] == "full":
        training["lora"] = None
    wanted = {hardware, *(choice["name"] for choice in compare)}
    cards = [
        row for row in gpu_table if hardware == "auto" or any(is_card(row, name) for name in wanted)
    ]
    chosen = from_json(TrainingSection, training, where="training")
    names = Training.__struct_fields__
    return PlanSpec(
        **{name: getattr(chosen, name) for name in names},
        origins=_origins(expert),
        hardware=hardware,
        gpu_table=tuple(cards),
        prices={
            row["name"]: {key: listed[key] for key in PRICE_KEYS if key in listed}
            for row in cards
            if (listed := _price(row, prices)) is not None
        },
        price_usd_per_hour=price[0],
        price_as_of=price[1],
        billing_minutes=billing_minutes,
        system=expert["system"],
        claims=tuple(from_json(Claim, claim, where="claims") for claim in expert["claims"]),
        compare=tuple(from_json(HardwareChoice, choice, where="compare") for choice in compare),
        may_drop_budgets=may_drop_budgets,
    )


def _origins(expert: Settings) -> dict[str, Origin]:
    """Keep the origins of what a plan holds; the length of rows goes by the plan's name for it."""
    told: dict[str, Origin] = expert["setting_origins"]
    kept = {name: told[name] for name in Training.__struct_fields__ if name in told}
    if without_auto(expert["training"]["max_seq_length"]) is not None:
        kept["sequence_length_tokens"] = told.get("max_seq_length", "default")
    return kept


def _price(row: Settings, prices: dict[str, Settings]) -> Settings | None:
    """Find what the user pays for a card, by its short name or else by a driver's."""
    names = (row["name"], *row.get("driver_names", []))
    return next((prices[name] for name in names if name in prices), None)


def calibration_spec(spec: PlanSpec, *, length: bool = False) -> PlanSpec:
    """Leave of a plan's settings what decides time and memory of a step.

    No prices, budgets or claims; neither what the short run sets for itself nor how large a step of
    the optimizer is, so that a sweep of learning rates pays for one calibration; with ``length``
    not how long the run is, either.
    """
    cards = [
        row for row in spec.gpu_table if spec.hardware == "auto" or is_card(row, spec.hardware)
    ]
    return replace(
        neutralize(spec, length=length),
        origins={},
        gpu_table=tuple(cards),
        prices={},
        price_usd_per_hour=None,
        price_as_of=None,
        billing_minutes=None,
        system=None,
        claims=(),
        compare=(),
        may_drop_budgets=False,
    )


def stage_spec(config: Settings) -> StageSpec:
    """Give the settings of ``stage_to_nvme``."""
    return StageSpec(scratch=config["scratch"], weights=config["stage_weights"])


def evaluation_spec(
    expert: Settings, artefacts: dict[str, str], content: dict[str, str]
) -> EvaluationSpec:
    """Give the settings of ``evaluate_expert``, with the paths and hashes of its files."""
    evaluation = {
        **expert["evaluation"],
        "decoding": expert["decoding"],
        "artefacts": artefacts,
        "content": content,
    }
    spec: EvaluationSpec = from_json(EvaluationSpec, evaluation, where="evaluation")
    return spec


def export_spec(name: str, expert: Settings) -> ExportSpec:
    """Give the settings of ``export_model``."""
    told = {"expert": name, "description": expert["description"], "decoding": expert["decoding"]}
    told["system_prompt"] = expert["data"]["system_prompt"]
    told["hub_datasets"] = {s.name: s.id for s in source_specs(expert) if s.kind == "hub"}
    spec: ExportSpec = from_json(ExportSpec, {**told, **expert["export"]}, where="export")
    return spec


def report_spec(name: str, expert: Settings, config: Settings) -> ReportSpec:
    """Give the settings of ``build_report``."""
    return ReportSpec(
        expert=name,
        preset=config["preset"],
        description=expert["description"],
        acceptance=tuple(AcceptanceRule(**rule) for rule in expert["acceptance"]),
    )


def is_card(row: Settings, hardware: str) -> bool:
    """Tell whether a row of the GPU table is the card that is named, by either of its names."""
    return hardware == row["name"] or hardware in row.get("driver_names", [])
