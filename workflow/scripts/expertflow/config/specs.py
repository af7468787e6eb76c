"""The settings that each rule reads, and nothing more.

A rule reruns when its spec changes, so a setting belongs into the spec of the first rule that reads
it and into no other. The function behind a rule has the rule's name.
"""

import contextlib
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from expertflow.chain import stages_before
from expertflow.config.ablations import variant_spec
from expertflow.config.code_digest import GENERATOR, chain_digests
from expertflow.config.expert import Expert
from expertflow.config.hardware_tables import calibration_spec, tuning_spec
from expertflow.config.load import told_training
from expertflow.core.errors import ConfigError
from expertflow.core.files import canonical_json
from expertflow.core.records import Record, from_json, to_json
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
from expertflow.evaluate.records import OWN_TASK, EvaluationSpec
from expertflow.export.records import ExportSpec
from expertflow.plan.records import PlanSpec
from expertflow.rental.bundle.records import BundleSpec
from expertflow.staging.records import StageSpec
from expertflow.studies.records import AblationSpec, VariantSpec
from expertflow.tokens.records import TOKENIZER_FILES, PackingSpec, TokenizerSpec, TokenSpec
from expertflow.train.records import ModelSpec

S = TypeVar("S", bound=Record)
# Of a source, what decides which records there are; how they are rendered comes later.
FETCHED = (
    "name", "kind", "n_shards", "path", "id", "revision", "config", "split", "generator",
    "n_documents", "seed", "options",
)  # fmt: skip
# Keys of the configuration that decide what a bundle holds. The others belong to a machine.
DECIDED = (
    "training", "hardware", "price_usd_per_hour", "price_as_of", "billing_minutes",
    "compare", "calibrate", "ablate", "ablation",
)  # fmt: skip


def spec_text(rule: str, expert: Expert, wildcards: Any) -> str:
    """Return a rule's settings as canonical JSON, which Snakemake compares.

    A rule without a function here reads none.
    """
    spec = globals().get(rule, lambda expert, _: {"expert": expert.name})
    return canonical_json(to_json(spec(expert, wildcards)))


def _pick(cls: type[S], *places: dict[str, Any], **own: Any) -> S:
    """Fill a spec: each field that is not given by the first place that has its name."""
    rest = [name for name in cls.__struct_fields__ if name not in own]
    found = {name: next(place[name] for place in places if name in place) for name in rest}
    return cls(**found, **own)


def fetch_source(expert: Expert, wildcards: Any) -> FetchSpec:
    source = expert.sources[wildcards.source]
    kept = SourceSpec(**{key: getattr(source, key) for key in FETCHED})
    return FetchSpec(source=kept, preset=expert.preset)


generate_source = fetch_source


def find_datasets(expert: Expert, _: Any) -> dict[str, Any]:
    licenses = {name: source.license for name, source in expert.sources.items()}
    return {"expert": expert.name, "preset": expert.preset, "licenses": licenses}


def prepare_shard(expert: Expert, wildcards: Any) -> PrepareSpec:
    data, near = expert.settings["data"], _near(expert)
    content = expert.hash_content(expert.benchmarks)
    return _pick(
        PrepareSpec,
        data,
        source=replace(
            expert.sources[wildcards.source],
            seed=None,
            n_documents=None,
            license=None,
            n_shards=None,
            weight=1.0,
            max_documents=None,
        ),
        evaluation_fields=tuple(sorted(set(expert.settings["evaluation"]["fields"].values()))),
        near=near and SignatureSpec(n_words=near.n_words, n_permutations=near.n_permutations),
        benchmarks=tuple(_benchmark(benchmark, content) for benchmark in data["benchmarks"]),
    )


def _benchmark(settings: dict[str, Any], content: dict[str, str]) -> BenchmarkSpec:
    """Pin a benchmark's content, which is listed under the path's one plain spelling."""
    sha256 = content.get(str(Path(settings["path"])))
    if sha256 is None:
        raise ConfigError(
            f"data.benchmarks names {settings['path']}, which is not there; correct the path"
        )
    return BenchmarkSpec(**settings, sha256=sha256)


def _near(expert: Expert) -> NearSpec | None:
    near = expert.settings["data"]["near_duplicates"]
    return None if near is None else NearSpec(**near)


def deduplicate_documents(expert: Expert, _: Any) -> DeduplicateSpec:
    data, sources = expert.settings["data"], expert.sources.values()
    cap = data["max_per_category"]
    caps = cap if isinstance(cap, dict) else {}
    return _pick(
        DeduplicateSpec,
        data,
        near=_near(expert),
        weights={s.name: s.weight for s in sources if s.weight != 1.0},
        max_per_source={s.name: s.max_documents for s in sources if s.max_documents is not None},
        max_per_category=cap if isinstance(cap, int) else None,
        category_caps={category_name(key): n for key, n in caps.items()},
    )


def prepare_model(expert: Expert, _: Any) -> ModelSpec:
    settings = expert.settings
    return _pick(
        ModelSpec,
        settings,
        settings["builtin"],
        revision=settings["model_revision"],
        license=settings["model_license"],
        seed=expert.training.seed,
        content=_model_content(expert, of_tokenizer=False),
    )


def prepare_tokenizer(expert: Expert, _: Any) -> TokenizerSpec:
    settings = expert.settings
    return _pick(
        TokenizerSpec,
        settings,
        settings["builtin"],
        settings["data"],
        revision=settings["model_revision"],
        content=_model_content(expert, of_tokenizer=True),
    )


def _model_content(expert: Expert, *, of_tokenizer: bool) -> dict[str, str]:
    """Hash the user's files of the tokenizer, or those of the model that are not its tokenizer's.

    Other weights beside the same tokenizer give the same tokens.
    """
    names, template = set(TOKENIZER_FILES), expert.settings["data"]["chat_template"]
    return {
        place: sha256
        for place, sha256 in expert.hash_content(expert.model_files).items()
        if (Path(place).name in names or place == str(Path(template))) == of_tokenizer
    }


def pretokenize_shard(expert: Expert, _: Any) -> TokenSpec:
    """Name the versions of the engines there are.

    Tokens that came with a bundle are no worse for the engines that are installed here.
    """
    versions = {}
    for engine in ("fastokens", "tokenizers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[engine] = metadata.version(engine)
    if expert.bundle is not None:
        versions = expert.bundle.tokens.versions
    return TokenSpec(engine=expert.settings["data"]["token_engine"], versions=versions)


def pack_sequences(expert: Expert, _: Any) -> PackingSpec:
    training, data = expert.settings["training"], expert.settings["data"]
    length = expert.training.max_seq_length
    return _pick(PackingSpec, training, data, sequence_length_tokens=length)


def plan_training(expert: Expert, _: Any) -> PlanSpec:
    return expert.plan_spec


def calibrate_expert(expert: Expert, _: Any) -> PlanSpec:
    return calibration_spec(expert.plan_spec)


def tune_expert(expert: Expert, _: Any) -> PlanSpec:
    return tuning_spec(expert.plan_spec)


def ablate_variant(expert: Expert, wildcards: Any) -> VariantSpec:
    return variant_spec(expert.ablation, wildcards.variant)


def ablate_expert(expert: Expert, _: Any) -> AblationSpec:
    return expert.ablation


def stage_to_nvme(expert: Expert, _: Any) -> StageSpec:
    return StageSpec(scratch=expert.config["scratch"], weights=expert.config["stage_weights"])


def evaluate_expert(expert: Expert, _: Any) -> EvaluationSpec:
    artifacts = expert.artifacts
    own = {place: [Path(place)] for place in artifacts.values() if ":" not in place}
    evaluation = {
        **expert.settings["evaluation"],
        "decoding": expert.settings["decoding"],
        "artifacts": artifacts,
        "content": expert.hash_content(own),
    }
    made: EvaluationSpec = from_json(EvaluationSpec, evaluation, where="evaluation")
    return made


def export_model(expert: Expert, _: Any) -> ExportSpec:
    settings = expert.settings
    told = {
        "expert": expert.name,
        "description": settings["description"],
        "decoding": settings["decoding"],
        "system_prompt": settings["data"]["system_prompt"],
        "hub_datasets": {s.name: s.id for s in expert.sources.values() if s.kind == "hub"},
    }
    spec: ExportSpec = from_json(ExportSpec, {**told, **settings["export"]}, where="export")
    return spec


def build_report(expert: Expert, _: Any) -> Any:
    # Here, as declaring all that a report holds takes a while.
    from expertflow.report.records import AcceptanceRule, ReportSpec

    return ReportSpec(
        expert=expert.name,
        preset=expert.preset,
        description=expert.settings["description"],
        acceptance=tuple(AcceptanceRule(**rule) for rule in expert.settings["acceptance"]),
    )


def make_bundle(expert: Expert, _: Any) -> BundleSpec:
    config, name = expert.config, expert.name
    sources = expert.sources.values()
    generators = sorted({GENERATOR + str(s.generator) for s in sources if s.kind == "generated"})
    asked = [key for key, value in config.items() if value is True]
    rules = [stage.name for stage in stages_before("compare_experts", asked=asked)]
    own_task = expert.own_artifacts.get(OWN_TASK)
    named = {**expert.benchmarks, **expert.model_files}
    named |= {own_task: [Path(expert.artifacts[OWN_TASK])]} if own_task else {}
    content = {place: expert.hash_content({place: files}) for place, files in named.items()}
    return BundleSpec(
        expert=name,
        config={
            "preset": expert.preset,
            **{key: config[key] for key in DECIDED},
            "experts": {name: config["experts"].get(name) or {}},
        },
        files=expert.settings_files,
        content={place: found for place, found in content.items() if found},
        artifacts=expert.artifacts,
        own_artifacts=expert.own_artifacts,
        tokens=pretokenize_shard(expert, None),
        code=chain_digests([*rules, *generators], expert.setup.scripts),
        with_weights=config["bundle_weights"],
        tuned=expert.training.tuned,
        staging=stage_to_nvme(expert, None),
        told=told_training(expert.told, name),
    )
