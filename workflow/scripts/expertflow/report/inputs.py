"""Everything the report is made from: one record of every stage, and two time series."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from msgspec.structs import replace

from expertflow.chain import STAGES, expand_path, stages_before
from expertflow.core.attempts import Attempt, attempts_path, read_attempts
from expertflow.core.errors import DataError
from expertflow.core.records import REPAIR, Record, from_json, read_record
from expertflow.data.records import DatasetManifest, DatasetSource, DocumentsRecord
from expertflow.evaluate.records import EvaluationRecord
from expertflow.export.records import ExportRecord
from expertflow.hardware.records import GpuSample, MonitorRecord
from expertflow.plan.records import Ledger, PaidSession, TrainPlan
from expertflow.report.records import ReportSpec
from expertflow.staging.records import StagingRecord
from expertflow.studies.records import AblationRecord
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import KernelProfile, ModelRecord, StepRecord, TrainingRecord

T = TypeVar("T")


class ReportInputs(Record, frozen=True, kw_only=True):
    """The inputs of ``build_report``; ``samples`` is empty if the monitor took none.

    ``preflight`` is stored verbatim, since machines report different readings. ``attempts`` has the
    jobs of each stage.
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
    attempts: dict[str, tuple[tuple[Attempt, ...], ...]]
    ledger: Ledger
    ablation: AblationRecord | None = None

    @property
    def asked(self) -> list[str]:
        """Names of the optional stages that were requested."""
        is_asked = {
            "tuned": "tuned" in self.plan.origins.values(),
            "calibrate": self.plan.cost.calibrated,
            "ablate": self.ablation is not None,
        }
        return [name for name, is_one in is_asked.items() if is_one]

    @property
    def paid_sessions(self) -> list[PaidSession]:
        """The guard's sessions on the machine that trained, or all if no job recorded it."""
        trained = self.attempts.get("train_expert")
        sessions = self.ledger.sessions
        return [s for s in sessions if not trained or s.machine == trained[0][-1].machine]


def read_inputs(
    spec: ReportSpec, folder: Path, *, ledger: Path, ablation: Path | None = None
) -> ReportInputs:
    """Read an expert's records; raise DataError if one is missing, malformed, or another's."""
    read: dict[str, Any] = {
        "ledger": read_record(Ledger, ledger) if ledger.is_file() else Ledger(),
        "attempts": {},
        "steps": read_lines(StepRecord, folder / "steps.jsonl"),
        "samples": read_lines(GpuSample, folder / "gpu.jsonl"),
        "profile": read_record(KernelProfile, folder / "profile" / "kernels.json"),
        "ablation": None if ablation is None else read_record(AblationRecord, ablation),
    }
    # The declaration determines what is read: ``plan: TrainPlan`` is plan.json.
    for name, cls in get_type_hints(ReportInputs).items():
        if name != "spec" and name not in read:
            read[name] = read_record(cls, folder / f"{name}.json")
    for name, record in read.items():
        # Not every record names an expert; those that do catch folders mixed up by a copy.
        if (expert := getattr(record, "expert", spec.expert)) != spec.expert:
            raise DataError(
                f"{name}: is for expert {expert!r}, the report for {spec.expert!r}; run that"
                " stage again"
            )
    inputs = ReportInputs(spec=spec, **read)
    return replace(inputs, attempts=read_jobs(folder, inputs.datasets.sources, inputs.asked))


def read_jobs(
    folder: Path, sources: Iterable[DatasetSource], asked: Collection[str]
) -> dict[str, tuple[tuple[Attempt, ...], ...]]:
    """Read the attempts of all jobs behind a report, and of its own, by stage."""
    jobs = {}
    for stage in (*stages_before("build_report", asked=asked), STAGES["build_report"]):
        names = expand_path(stage, stage.log, sources)
        # No record lists the variants that ran, but their logs do.
        if "{variant}" in stage.log:
            names = sorted(f"logs/{path.name}" for path in folder.glob(f"logs/{stage.name}.*.log"))
        read = [read_attempts(attempts_path(folder / name)) for name in names]
        # A job that was run by hand recorded none.
        if found := tuple(attempts for attempts in read if attempts):
            jobs[stage.name] = found
    return jobs


def read_lines(cls: type[T], path: Path) -> tuple[T, ...]:
    r"""Read one record per line; raise DataError with the line number, or if the file is missing.

    Bytes are split on ``\n`` alone: ``str.splitlines`` also breaks at U+2028, legal inside JSON.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise DataError(f"{path}: the series is missing; {REPAIR}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: not a JSON record ({error}); {REPAIR}"
                ) from error
            records.append(from_json(cls, value, where=f"{path}:{number}"))
    return tuple(records)
