"""The settings that each rule reads, and nothing more.

A rule reruns when its spec changes, so a setting belongs in the spec of the first rule that reads
it and in no other. The function behind a rule has the rule's name.
"""

from functools import cache, reduce
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from expertflow.chain import stages_before
from expertflow.config.ablations import variant_spec
from expertflow.config.code_digest import GENERATOR, rule_digest
from expertflow.config.expert import ConfiguredExpert
from expertflow.config.hardware_tables import calibration_spec
from expertflow.config.load import lay_over, training_overrides
from expertflow.core.files import canonical_json
from expertflow.core.records import Record, from_json, to_json
from expertflow.data.settings import (
    DeduplicateSpec,
    FetchSpec,
    PrepareSpec,
    SignatureSpec,
    SourceSpec,
    format_label,
)
from expertflow.evaluate.records import OWN_TASK, EvaluationSpec, GenerationSpec
from expertflow.export.records import ExportSpec
from expertflow.plan.records import PlanSpec
from expertflow.rental.bundle.records import BundleSpec
from expertflow.staging.records import StageSpec
from expertflow.studies.records import AblationSpec, VariantSpec
from expertflow.tokens.records import TOKENIZER_FILES, PackingSpec, TokenizerSpec, TokenSpec
from expertflow.train.records import ModelSpec

S = TypeVar("S", bound=Record)
# Keys of a source that determine its records; how they are rendered comes later.
FETCHED = (
    "name", "kind", "n_shards", "path", "id", "revision", "config", "split", "generator",
    "n_documents", "seed", "options",
)  # fmt: skip
# Keys of the configuration that affect a bundle's contents. The others belong to a machine.
DECIDED = (
    "training", "hardware", "price_usd_per_hour", "price_as_of", "billing_minutes",
    "compare", "calibrate", "ablate", "ablation",
)  # fmt: skip


# Once per process: Snakemake asks for each job.
code_of = cache(rule_digest)


def spec_text(rule: str, expert: ConfiguredExpert, wildcards: Any) -> str:
    """Return a rule's settings as canonical JSON, which Snakemake compares.

    A rule without a function here reads none.
    """
    spec = globals().get(rule, lambda expert, _: {"expert": expert.name})
    return canonical_json(to_json(spec(expert, wildcards)))


def _fill(cls: type[S], *places: dict[str, object], **own: Any) -> S:
    """Fill a spec: fields that are not given come from the first place that has their name."""
    # Reversed, so that the first place overrides the others.
    found = {name: p[name] for p in reversed(places) for name in cls.__struct_fields__ if name in p}
    return from_json(cls, {**found, **own}, where=cls.__name__)


def fetch_source(expert: ConfiguredExpert, wildcards: Any) -> FetchSpec:
    source = expert.sources[wildcards.source]
    kept = SourceSpec(**{key: getattr(source, key) for key in FETCHED})
    return FetchSpec(source=kept, preset=expert.preset)


generate_source = fetch_source


def find_datasets(expert: ConfiguredExpert, _: Any) -> dict[str, object]:
    licenses = {name: source.license for name, source in expert.sources.items()}
    return {"expert": expert.name, "preset": expert.preset, "licenses": licenses}


def prepare_shard(expert: ConfiguredExpert, wildcards: Any) -> PrepareSpec:
    data, content = expert.settings["data"], expert.hash_content(expert.benchmarks)
    near = data["near_duplicates"]
    return _fill(
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
        evaluation_fields=sorted(set(expert.settings["evaluation"]["fields"].values())),
        near=near and {name: near[name] for name in SignatureSpec.__struct_fields__},
        # Content is listed under the normalized path.
        benchmarks=[{**b, "sha256": content[str(Path(b["path"]))]} for b in data["benchmarks"]],
    )


def deduplicate_documents(expert: ConfiguredExpert, _: Any) -> DeduplicateSpec:
    data, sources = expert.settings["data"], expert.sources.values()
    cap = data["max_per_category"]
    caps = cap if isinstance(cap, dict) else {}
    return _fill(
        DeduplicateSpec,
        data,
        near=data["near_duplicates"],
        weights={s.name: s.weight for s in sources if s.weight != 1.0},
        max_per_source={s.name: s.max_documents for s in sources if s.max_documents is not None},
        max_per_category=cap if isinstance(cap, int) else None,
        category_caps={format_label(key): n for key, n in caps.items()},
    )


def prepare_model(expert: ConfiguredExpert, _: Any) -> ModelSpec:
    own = {"license": expert.settings["model_license"], "seed": expert.training.seed}
    return _fill_of_model(ModelSpec, expert, of_tokenizer=False, **own)


def prepare_tokenizer(expert: ConfiguredExpert, _: Any) -> TokenizerSpec:
    return _fill_of_model(TokenizerSpec, expert, of_tokenizer=True)


def _fill_of_model(cls: type[S], expert: ConfiguredExpert, *, of_tokenizer: bool, **own: Any) -> S:
    """Fill the spec of a tokenizer, or of a model, with hashes of only its own user files.

    Different weights with the same tokenizer give the same tokens.
    """
    settings = expert.settings
    places = settings, settings["builtin"], settings["data"]
    template = str(Path(settings["data"]["chat_template"]))

    def is_tokenizers(place: str) -> bool:
        return place == template or any(map(Path(place).match, TOKENIZER_FILES))

    files = expert.hash_content(expert.model_files).items()
    content = {place: sha256 for place, sha256 in files if is_tokenizers(place) == of_tokenizer}
    return _fill(cls, *places, revision=settings["model_revision"], content=content, **own)


def pretokenize_shard(expert: ConfiguredExpert, _: Any) -> TokenSpec:
    """List the versions of the installed engines.

    Tokens that came with a bundle stay valid whichever engines are installed here.
    """
    # What auto chooses depends on the installed engines.
    versions = {engine: metadata.version(engine) for engine in ("fastokens", "tokenizers")}
    if expert.bundle is not None:
        versions = expert.bundle.tokens.versions
    return TokenSpec(engine=expert.settings["data"]["token_engine"], versions=versions)


def pack_sequences(expert: ConfiguredExpert, _: Any) -> PackingSpec:
    training, data = expert.settings["training"], expert.settings["data"]
    length = expert.training.max_seq_length
    return _fill(PackingSpec, training, data, sequence_length_tokens=length)


def plan_training(expert: ConfiguredExpert, _: Any) -> PlanSpec:
    return expert.plan_spec


def calibrate_expert(expert: ConfiguredExpert, _: Any) -> PlanSpec:
    return calibration_spec(expert.plan_spec)


def tune_expert(expert: ConfiguredExpert, _: Any) -> PlanSpec:
    # Steps are alike in every epoch, and a search that read the tuning it makes would never end.
    return replace(calibration_spec(expert.plan_spec), max_steps=None, tuned=None)


def ablate_variant(expert: ConfiguredExpert, wildcards: Any) -> VariantSpec:
    return variant_spec(expert.ablation, wildcards.variant)


def ablate_expert(expert: ConfiguredExpert, _: Any) -> AblationSpec:
    return expert.ablation


def stage_to_nvme(expert: ConfiguredExpert, _: Any) -> StageSpec:
    return StageSpec(scratch=expert.config["scratch"], weights=expert.config["stage_weights"])


def generate_answers(expert: ConfiguredExpert, _: Any) -> GenerationSpec:
    settings, artifacts = expert.settings, expert.artifacts
    # The sources' records show whether generated files changed.
    own = [artifacts[key] for key in expert.own_artifacts]
    # Some of these are names, not files.
    lm_eval = (settings["evaluation"]["lm_eval"] or {}).get("tasks", ())
    content = expert.hash_content({place: [Path(place)] for place in (*own, *lm_eval)})
    return _fill(
        GenerationSpec, settings["evaluation"], settings, artifacts=artifacts, content=content
    )


# It chooses the same questions.
check_references = generate_answers


def evaluate_expert(expert: ConfiguredExpert, _: Any) -> EvaluationSpec:
    grouped = [source.name for source in expert.sources.values() if source.group is not None]
    return _fill(EvaluationSpec, expert.settings["evaluation"], grouped_sources=grouped)


def export_model(expert: ConfiguredExpert, _: Any) -> ExportSpec:
    settings, sources = expert.settings, expert.sources.values()
    return _fill(
        ExportSpec,
        settings["export"],
        settings,
        settings["data"],
        expert=expert.name,
        hub_datasets={s.name: s.id for s in sources if s.kind == "hub"},
    )


def build_report(expert: ConfiguredExpert, _: Any) -> Any:
    # Imported here, because declaring everything in a report takes a while.
    from expertflow.report.records import ReportSpec

    return _fill(ReportSpec, expert.settings, expert=expert.name)


def make_bundle(expert: ConfiguredExpert, _: Any) -> BundleSpec:
    config, name = expert.config, expert.name
    sources = expert.sources.values()
    generators = sorted({GENERATOR + str(s.generator) for s in sources if s.kind == "generated"})
    asked = [key for key, value in config.items() if value is True]
    # Everything that runs after opening, and what made the data: opening reports differences.
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
        code={rule: rule_digest(rule) for rule in [*rules, *generators]},
        with_weights=config["bundle_weights"],
        tuned=expert.training.tuned,
        staging=stage_to_nvme(expert, None),
        told=reduce(lay_over, (training_overrides(told, name) for told in expert.told)),
    )
