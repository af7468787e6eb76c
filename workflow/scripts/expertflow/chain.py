"""The chain: all stages in order, with their inputs and outputs, declared once.

A stage is a rule in workflow/rules, a script of the same name in workflow/scripts and a package of
this library. To add one, write these three and add it to ``CHAIN``, after all that it reads. From
``CHAIN`` come the outputs and logs of the rules, the code that a bundle is made by, what a bundle
and an outcome hold, the provenance of a report and the drawing on its page. Tests compare it with
the graph of the rules, and with the drawings in Snakefile and README.md.
"""

import re
from collections.abc import Callable, Collection, Iterable
from typing import Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.data.records import SourceLock
from expertflow.data.shards import shard_names, token_shards


class Stage(Record, frozen=True, kw_only=True):
    """A step of the chain; paths are below ``folder``, those of directories end with a slash.

    ``reads`` names stages; ``record`` is the JSON that later ones read first. ``files`` are read,
    too, or are results; ``stays`` names those that a bundle omits. ``asked`` names the setting or
    target that adds the stage, if it is optional. ``shards`` names its jobs by a source's number of
    document shards. ``side`` is the column of a drawing above the row where documents and tokens
    meet.
    """

    name: str
    package: str
    record: str
    about: str
    reads: str = ""
    files: dict[str, str] = field(default_factory=dict)
    stays: tuple[str, ...] = ()
    asked: str = ""
    shards: Callable[[int], Iterable[str]] = shard_names
    side: Literal["", "documents", "tokens"] = ""
    folder: str = "results/{expert}"

    @property
    def pattern(self) -> str:
        """The record's path with an asterisk for what differs from job to job."""
        return re.sub(r"{\w+}", "*", self.record)


CHAIN = (
    Stage(
        name="fetch_source",
        package="data",
        record="sources/fetched/{source}.json",
        about="raw records on this disk",
        side="documents",
    ),
    Stage(
        name="generate_source",
        package="data",
        record="sources/generated/{source}.json",
        files={"directory": "sources/generated/{source}/"},
        stays=("directory",),
        about="raw records on this disk",
        side="documents",
    ),
    Stage(
        name="find_datasets",
        package="data",
        record="datasets.json",
        reads="fetch_source generate_source",
        about="which data sets, licenses, shards",
        side="documents",
    ),
    Stage(
        name="prepare_shard",
        package="data",
        record="documents/{source}/{shard}.json",
        files={
            "documents": "documents/{source}/{shard}.arrow",
            "rejected": "documents/{source}/{shard}.rejected.jsonl",
        },
        stays=("rejected",),
        reads="fetch_source generate_source",
        about="validated documents; rejects with their reason",
        side="documents",
    ),
    Stage(
        name="deduplicate_documents",
        package="data",
        record="documents.json",
        files={"keep": "keep.arrow"},
        reads="prepare_shard",
        about="kept or dropped; train or held out",
        side="documents",
    ),
    Stage(
        name="prepare_tokenizer",
        package="tokens",
        record="tokenizer.json",
        files={"directory": "tokenizer/"},
        # Documents only if a builtin tokenizer learns from them.
        reads="prepare_shard deduplicate_documents",
        about="tokenizer and layout of chats, hashed",
        side="tokens",
    ),
    Stage(
        name="pretokenize_shard",
        package="tokens",
        record="tokens/{source}/{shard}.json",
        files={
            "ids": "tokens/{source}/{shard}.ids",
            "index": "tokens/{source}/{shard}.arrow",
        },
        stays=("ids", "index"),
        shards=token_shards,
        reads="prepare_shard prepare_tokenizer",
        about="token ids of all documents, made once",
        side="tokens",
    ),
    Stage(
        name="pack_sequences",
        package="tokens",
        record="packing.json",
        files={"directory": "packed/"},
        reads="deduplicate_documents pretokenize_shard",
        about="rows of one length, documents kept apart",
    ),
    Stage(
        name="prepare_model",
        package="train",
        record="model.json",
        files={"directory": "base_model/"},
        reads="prepare_tokenizer",
        about="base model, hashed",
    ),
    Stage(
        name="tune_expert",
        package="studies",
        record="tuning.json",
        reads="prepare_model pack_sequences",
        about="fastest settings here",
        asked="tuned",
    ),
    Stage(
        name="calibrate_expert",
        package="studies",
        record="calibration.json",
        reads="prepare_model pack_sequences tune_expert",
        about="seconds of a step",
        asked="calibrate",
    ),
    Stage(
        name="plan_training",
        package="studies",
        record="plan.json",
        reads="prepare_model pack_sequences tune_expert calibrate_expert",
        about="every setting with its reason; memory, hours, dollars",
    ),
    Stage(
        name="make_bundle",
        package="rental",
        record="bundle.tar",
        reads=(
            "fetch_source generate_source find_datasets prepare_shard deduplicate_documents "
            "prepare_tokenizer prepare_model pretokenize_shard pack_sequences "
            "calibrate_expert plan_training"
        ),
        about="one file for another machine",
        asked="bundle.tar",
    ),
    Stage(
        name="stage_to_nvme",
        package="staging",
        record="staging.json",
        reads="prepare_model pack_sequences plan_training",
        about="rows on a fast disk, or why not",
    ),
    Stage(
        name="ablate_variant",
        package="studies",
        record="ablation/{variant}.json",
        reads=(
            "prepare_shard deduplicate_documents prepare_model pack_sequences plan_training "
            "stage_to_nvme"
        ),
        about="what one switch is worth here",
        asked="ablate",
    ),
    Stage(
        name="ablate_expert",
        package="studies",
        record="ablation.json",
        files={"html": "ablation.html"},
        reads="prepare_model plan_training ablate_variant",
        about="what each switch is worth here, beside the claims",
        asked="ablate",
    ),
    Stage(
        name="train_expert",
        package="train",
        record="training.json",
        files={
            "checkpoint": "checkpoint/",
            "steps": "steps.jsonl",
            "gpu": "gpu.jsonl",
            "monitor": "monitor.json",
            "preflight": "preflight.json",
            "profile": "profile/",
        },
        reads="prepare_model pack_sequences plan_training stage_to_nvme",
        about="checkpoint, resumable at any moment",
    ),
    Stage(
        name="evaluate_expert",
        package="evaluate",
        record="evaluation.json",
        files={"answers": "answers.jsonl"},
        reads=(
            "fetch_source generate_source prepare_shard deduplicate_documents prepare_model "
            "pack_sequences plan_training stage_to_nvme train_expert"
        ),
        about="before and after, on documents training never saw",
    ),
    Stage(
        name="export_model",
        package="export",
        record="export.json",
        files={"directory": "merged/"},
        reads=(
            "find_datasets prepare_model pack_sequences plan_training train_expert evaluate_expert"
        ),
        about="merged model and model card",
    ),
    Stage(
        name="build_report",
        package="report",
        record="report.json",
        files={"html": "report.html"},
        reads=(
            "find_datasets deduplicate_documents prepare_model pack_sequences plan_training "
            "stage_to_nvme ablate_expert train_expert evaluate_expert export_model"
        ),
        about="report.json, report.html",
    ),
    Stage(
        name="compare_experts",
        package="report",
        record="index.json",
        files={"html": "index.html"},
        reads="build_report",
        about="results/index.html",
        folder="results",
    ),
)
STAGES = {stage.name: stage for stage in CHAIN}


def expand_path(stage: Stage, path: str, sources: Iterable[SourceLock]) -> list[str]:
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
