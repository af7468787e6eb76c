"""A tiny run, made and trained in the test's process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import write_tiny_run

from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.staging.records import StagingRecord
from expertflow.train import job, processes
from expertflow.train.records import ModelRecord, RunSummary, TrainingRecord
from expertflow.train.run import TrainingRun, TrainInputs
from expertflow.train.saved import checkpoint_files
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.start import assemble_run


def made(folder: Path, **settings: Any) -> TrainInputs:
    folder.mkdir(exist_ok=True)
    write_tiny_run(folder, **settings)
    (folder / "state").mkdir()
    return assigned(folder)


def assigned(folder: Path) -> TrainInputs:
    return TrainInputs(
        plan=read_record(TrainPlan, folder / "plan.json"),
        model=read_record(ModelRecord, folder / "model.json"),
        rows=Path(read_record(StagingRecord, folder / "staging.json").rows.source),
        state=folder / "state",
        seen_s=checkpoint_files.last_seen_s(folder / "state"),
    )


def train(inputs: TrainInputs) -> RunSummary:
    return job.train_expert(inputs, processes.start_processes(inputs.plan))


def finish(folder: Path) -> TrainingRecord:
    """Run the complete training job of a folder; a finished one is only published."""
    records = {name: folder / f"{name}.json" for name in ("plan", "packing", "model", "staging")}
    places = {"state": folder / "state", "checkpoint": folder / "checkpoint"}
    output = folder / "training.json"
    assert job.run_job(job.TrainingJob(**records, **places, output=output, code="c"))
    return read_record(TrainingRecord, output)


@contextmanager
def assembled(inputs: TrainInputs, *, keep: int = 1) -> Iterator[TrainingRun]:
    group = processes.start_processes(inputs.plan)
    with Saver(inputs.state, keep=keep) as saver:
        yield assemble_run(inputs, processes=group, saver=saver, stop=lambda: False, directory=None)
