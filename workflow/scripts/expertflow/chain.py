"""The chain: all stages in order, with their inputs and outputs, declared once.

A stage is a rule in workflow/rules, a script of the same name in workflow/scripts and a package of
this library. To add one, write these three and add it to ``CHAIN``, after everything it reads.
``CHAIN`` determines the outputs and logs of the rules, the code that makes a bundle, the contents
of bundles and outcomes, and the provenance of a report. Tests compare it with the graph of the
rules, and with the diagrams in Snakefile, README.md and docs/architecture.md.
"""

import re
from collections.abc import Callable, Collection, Iterable

from msgspec import field

from expertflow.core.records import Record
from expertflow.data.records import DatasetSource, SourceLock
from expertflow.data.shards import shard_names, token_shards


class Stage(Record, frozen=True):
    """A step of the chain; paths are relative to ``folder``, those of directories end with a slash.

    ``record`` is the JSON that later stages read first; ``reads`` lists the stages it reads.
    ``files`` are its other outputs; ``stays`` lists those that a bundle omits. ``asked`` names the
    setting or target that adds the stage, if it is optional. ``shards`` returns its jobs' names for
    a source's number of document shards.
    """

    name: str
    record: str
    reads: str = ""
    files: dict[str, str] = field(default_factory=dict)
    stays: tuple[str, ...] = ()
    asked: str = ""
    shards: Callable[[int], Iterable[str]] = shard_names
    folder: str = "results/{expert}"

    @property
    def pattern(self) -> str:
        """The record's path with asterisks for what differs from job to job."""
        return re.sub(r"{\w+}", "*", self.record)

    @property
    def log(self) -> str:
        return ".".join([f"logs/{self.name}", *re.findall(r"{\w+}", self.record), "log"])


CHAIN = (
    Stage("fetch_source", "sources/fetched/{source}.json"),
    Stage(
        "generate_source",
        "sources/generated/{source}.json",
        files={"directory": "sources/generated/{source}/"},
        stays=("directory",),
    ),
    Stage("find_datasets", "datasets.json", "fetch_source generate_source"),
    Stage(
        "prepare_shard",
        "documents/{source}/{shard}.json",
        "fetch_source generate_source",
        files={
            "documents": "documents/{source}/{shard}.arrow",
            "rejected": "documents/{source}/{shard}.rejected.jsonl",
        },
        stays=("rejected",),
    ),
    Stage(
        "deduplicate_documents",
        "documents.json",
        "prepare_shard",
        files={"keep": "keep.arrow"},
    ),
    Stage(
        "prepare_tokenizer",
        "tokenizer.json",
        # Documents only if a builtin tokenizer learns from them.
        "prepare_shard deduplicate_documents",
        files={"directory": "tokenizer/"},
    ),
    Stage(
        "pretokenize_shard",
        "tokens/{source}/{shard}.json",
        "prepare_shard prepare_tokenizer",
        files={"ids": "tokens/{source}/{shard}.ids", "index": "tokens/{source}/{shard}.arrow"},
        stays=("ids", "index"),
        shards=token_shards,
    ),
    Stage(
        "pack_sequences",
        "packing.json",
        "deduplicate_documents pretokenize_shard",
        files={"directory": "packed/"},
    ),
    Stage(
        "check_references",
        "references.json",
        "fetch_source generate_source prepare_shard deduplicate_documents prepare_tokenizer",
    ),
    Stage(
        "prepare_model",
        "model.json",
        "prepare_tokenizer",
        files={"directory": "base_model/"},
    ),
    Stage("tune_expert", "tuning.json", "prepare_model pack_sequences", asked="tuned"),
    Stage(
        "calibrate_expert",
        "calibration.json",
        "prepare_model pack_sequences tune_expert",
        asked="calibrate",
    ),
    Stage(
        "plan_training", "plan.json", "prepare_model pack_sequences tune_expert calibrate_expert"
    ),
    Stage(
        "make_bundle",
        "bundle.tar",
        "fetch_source generate_source find_datasets prepare_shard deduplicate_documents "
        "prepare_tokenizer prepare_model pretokenize_shard pack_sequences check_references "
        "calibrate_expert plan_training",
        asked="bundle.tar",
    ),
    Stage("stage_to_nvme", "staging.json", "prepare_model pack_sequences plan_training"),
    Stage(
        "ablate_variant",
        "ablation/{variant}.json",
        "prepare_shard deduplicate_documents prepare_model pack_sequences plan_training "
        "stage_to_nvme",
        asked="ablate",
    ),
    Stage(
        "ablate_expert",
        "ablation.json",
        "prepare_model plan_training ablate_variant",
        files={"html": "ablation.html"},
        asked="ablate",
    ),
    Stage(
        "train_expert",
        "training.json",
        "prepare_model pack_sequences plan_training stage_to_nvme",
        files={
            "checkpoint": "checkpoint/",
            "steps": "steps.jsonl",
            "gpu": "gpu.jsonl",
            "monitor": "monitor.json",
            "preflight": "preflight.json",
            "profile": "profile/",
        },
    ),
    Stage(
        "generate_answers",
        "generations.json",
        "fetch_source generate_source prepare_shard deduplicate_documents check_references "
        "prepare_model pack_sequences plan_training stage_to_nvme train_expert",
    ),
    Stage(
        "evaluate_expert",
        "evaluation.json",
        "fetch_source generate_source prepare_shard deduplicate_documents prepare_model "
        "pack_sequences generate_answers",
        files={"answers": "answers.jsonl"},
    ),
    Stage(
        "export_model",
        "export.json",
        "find_datasets prepare_model pack_sequences plan_training train_expert evaluate_expert",
        files={"directory": "merged/"},
    ),
    Stage(
        "build_report",
        "report.json",
        "find_datasets deduplicate_documents prepare_model pack_sequences plan_training "
        "stage_to_nvme ablate_expert train_expert evaluate_expert export_model",
        files={"html": "report.html"},
    ),
    Stage(
        "compare_experts",
        "index.json",
        "build_report",
        files={"html": "index.html"},
        folder="results",
    ),
)
STAGES = {stage.name: stage for stage in CHAIN}


def expand_path(
    stage: Stage, path: str, sources: Iterable[SourceLock | DatasetSource]
) -> list[str]:
    """Return the files that a path of a stage stands for, by source and shard."""
    if "{" not in path:
        return [path]
    if "{variant}" in path:
        # An ablation lists its own variants.
        return []
    found = []
    for source in sources:
        if "{shard}" in path:
            shards = stage.shards(source.n_shards)
            found += [path.format(source=source.name, shard=shard) for shard in shards]
        elif (source.kind == "generated") == (stage.name == "generate_source"):
            found.append(path.format(source=source.name))
    return found


def stages_before(name: str, *, asked: Collection[str] = ()) -> list[Stage]:
    """Return a stage's direct and indirect inputs in order; optional ones only if ``asked``."""
    found, waiting = set[str](), STAGES[name].reads.split()
    while waiting:
        stage = STAGES[waiting.pop()]
        if stage.name not in found and (not stage.asked or stage.asked in asked):
            found.add(stage.name)
            waiting += stage.reads.split()
    return [stage for stage in CHAIN if stage.name in found]
