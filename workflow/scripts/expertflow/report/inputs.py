"""Everything the report is made from: one record of every stage, and two time series."""

import json
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

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


class ReportInputs(Record, frozen=True, kw_only=True):
    """The inputs of ``build_report``; ``samples`` is empty if the monitor took none.

    ``preflight`` is stored verbatim, since machines report different readings.
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


def read_inputs(spec: ReportSpec, folder: Path, *, ablation: Path | None = None) -> ReportInputs:
    """Read an expert's records; raise DataError if one is missing, malformed, or another's."""
    read: dict[str, Any] = {
        "steps": read_lines(StepRecord, folder / "steps.jsonl"),
        "samples": read_lines(GpuSample, folder / "gpu.jsonl"),
        "profile": read_record(KernelProfile, folder / "profile" / "kernels.json"),
        "ablation": None if ablation is None else read_record(AblationRecord, ablation),
    }
    for name, cls in get_type_hints(ReportInputs).items():
        if name != "spec" and name not in read:
            read[name] = read_record(cls, folder / f"{name}.json")
    for name, record in read.items():
        if (expert := getattr(record, "expert", spec.expert)) != spec.expert:
            raise DataError(
                f"{name}: is about expert {expert!r}, the report about {spec.expert!r}; run that"
                " stage again"
            )
    return ReportInputs(spec=spec, **read)


def read_lines(cls: type[T], path: Path) -> tuple[T, ...]:
    r"""Read one record per line; raise DataError with the line number, or if the file is missing.

    Bytes are split on ``\n`` alone: ``str.splitlines`` also breaks at U+2028, legal inside JSON.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise DataError(f"{path}: the series is missing; run training again") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not a JSON record ({error})") from error
            records.append(from_json(cls, value, where=f"{path}:{number}"))
    return tuple(records)
