"""A tiny run, made and trained in the test's own process."""

from pathlib import Path
from typing import Any

from support import write_tiny_run

from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.staging.records import StagingRecord
from expertflow.train import expert, processes
from expertflow.train.assemble import Assignment
from expertflow.train.records import ModelRecord


def made(folder: Path, **settings: Any) -> Assignment:
    """Write what a run reads; ``settings`` are those of training."""
    folder.mkdir(exist_ok=True)
    write_tiny_run(folder, **settings)
    (folder / "state").mkdir()
    return assigned(folder)


def assigned(folder: Path) -> Assignment:
    """Read what was written."""
    return Assignment(
        plan=read_record(TrainPlan, folder / "plan.json"),
        model=read_record(ModelRecord, folder / "model.json"),
        rows=Path(read_record(StagingRecord, folder / "staging.json").rows.source),
        state=folder / "state",
    )


def train(assignment: Assignment) -> dict[str, Any]:
    return expert.train_expert(assignment, processes.start(assignment.plan))
