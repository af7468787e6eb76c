"""Everything the report is made from, bundled: one record of every stage, and two series."""

import json
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import fields

from expertflow.core.errors import DataError
from expertflow.core.records import Record, from_json, read_record
from expertflow.data.records import DatasetManifest, DocumentsRecord
from expertflow.evaluate.records import EvaluationRecord
from expertflow.export.records import ExportRecord
from expertflow.hardware.records import GpuSample, MonitorRecord
from expertflow.plan.records import TrainPlan
from expertflow.report.records import ReportSpec
from expertflow.staging.records import StagingRecord
from expertflow.studies.records import AblationRecord
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import KernelProfile, ModelRecord, StepRecord, TrainingRecord

T = TypeVar("T")


class ReportPaths(Record, frozen=True, kw_only=True):
    """Where the records of one expert lie. The two series hold one JSON record a line."""

    datasets: Path
    documents: Path
    model: Path
    packing: Path
    plan: Path
    staging: Path
    training: Path
    monitor: Path
    evaluation: Path
    export: Path
    steps: Path
    samples: Path
    preflight: Path
    profile: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "ReportPaths":
        """Give the places under which the workflow keeps an expert's records."""
        records = {field.name: folder / f"{field.name}.json" for field in fields(cls)}
        series = {"steps": folder / "steps.jsonl", "samples": folder / "gpu.jsonl"}
        profile = {"profile": folder / "profile" / "kernels.json"}
        return cls(**{**records, **series, **profile})


class ReportInputs(Record, frozen=True, kw_only=True):
    """What ``build_report`` reads, and nothing else. ``samples`` is empty where none was taken.

    ``preflight`` holds the readings that the training job took before it began; no two machines
    tell the same, so it is kept as it is. ``ablation`` is null where none was asked for.
    """

    spec: ReportSpec
    datasets: DatasetManifest
    documents: DocumentsRecord
    model: ModelRecord
    packing: PackingRecord
    plan: TrainPlan
    staging: StagingRecord
    training: TrainingRecord
    monitor: MonitorRecord
    evaluation: EvaluationRecord
    export: ExportRecord
    steps: tuple[StepRecord, ...]
    samples: tuple[GpuSample, ...]
    preflight: dict[str, Any]
    profile: KernelProfile
    ablation: AblationRecord | None = None


def read_inputs(
    spec: ReportSpec, paths: ReportPaths, *, ablation: Path | None = None
) -> ReportInputs:
    """Read all records, and check that they speak of the same expert.

    Raises:
        DataError: a record is missing, malformed, or belongs to another expert.
    """
    inputs = ReportInputs(
        spec=spec,
        datasets=read_record(DatasetManifest, paths.datasets),
        documents=read_record(DocumentsRecord, paths.documents),
        model=read_record(ModelRecord, paths.model),
        packing=read_record(PackingRecord, paths.packing),
        plan=read_record(TrainPlan, paths.plan),
        staging=read_record(StagingRecord, paths.staging),
        training=read_record(TrainingRecord, paths.training),
        monitor=read_record(MonitorRecord, paths.monitor),
        evaluation=read_record(EvaluationRecord, paths.evaluation),
        export=read_record(ExportRecord, paths.export),
        steps=read_lines(StepRecord, paths.steps),
        samples=read_lines(GpuSample, paths.samples),
        preflight=read_record(dict[str, Any], paths.preflight),
        profile=read_record(KernelProfile, paths.profile),
        ablation=None if ablation is None else read_record(AblationRecord, ablation),
    )
    _check_same_expert(inputs)
    return inputs


def read_lines(cls: type[T], path: Path) -> tuple[T, ...]:
    r"""Read one record a line.

    Bytes are split on ``\n`` alone: ``str.splitlines`` also breaks at U+2028, legal inside JSON.

    Raises:
        DataError: the file is missing, or a line is no record; the message has its number.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise DataError(f"{path}: the series is missing; run training again") from error
    return tuple(
        _line(cls, line, where=f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )


def _line(cls: type[T], line: bytes, *, where: str) -> T:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not a JSON record ({error})") from error
    record: T = from_json(cls, value, where=where)
    return record


def _check_same_expert(inputs: ReportInputs) -> None:
    named = {
        "datasets": inputs.datasets.expert,
        "documents": inputs.documents.expert,
        "packing": inputs.packing.expert,
        "plan": inputs.plan.expert,
        "staging": inputs.staging.expert,
        "training": inputs.training.expert,
        "evaluation": inputs.evaluation.expert,
        "export": inputs.export.expert,
    }
    if inputs.ablation is not None:
        named["ablation"] = inputs.ablation.expert
    for record, expert in named.items():
        if expert != inputs.spec.expert:
            raise DataError(
                f"{record}: is about expert {expert!r}, the report about "
                f"{inputs.spec.expert!r}; run that stage again"
            )
