"""What a model card is written from: the records of a run, and what the export found."""

from dataclasses import dataclass

from expertflow.data.records import DatasetManifest
from expertflow.evaluate.records import EvaluationRecord
from expertflow.export.licences import Licensed
from expertflow.export.merge_check import Comparison
from expertflow.export.records import ExportRecord, ExportSpec
from expertflow.hardware.records import MonitorRecord
from expertflow.plan.records import TrainPlan
from expertflow.train.records import ModelRecord, TrainingRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class CardInputs:
    """The records of one run; ``code`` is the digest of the code that exports."""

    spec: ExportSpec
    datasets: DatasetManifest
    model: ModelRecord
    plan: TrainPlan
    training: TrainingRecord
    monitor: MonitorRecord
    evaluation: EvaluationRecord
    code: str

    @property
    def made_from(self) -> list[Licensed]:
        """List the base model and the sources with their licences."""
        base = Licensed(name=self.model.name, licence=self.model.licence, is_base=True)
        sources = (Licensed(name=s.name, licence=s.licence) for s in self.datasets.sources)
        return [base, *sources]

    @property
    def is_demo(self) -> bool:
        """Tell whether the preset makes models that are not for use."""
        return self.datasets.preset == "demo"


@dataclass(frozen=True, slots=True)
class Exported:
    """What the export itself did. ``licence_files`` are the base's own, beside the weights."""

    record: ExportRecord
    comparison: Comparison
    licence_files: tuple[str, ...] = ()
