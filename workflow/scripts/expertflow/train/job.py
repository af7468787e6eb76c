"""The training job: lock the state, watch the machine, train or find it done, publish."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from expertflow.core.errors import TrainingError
from expertflow.core.files import remove, write_text
from expertflow.core.records import read_record, write_record
from expertflow.plan.override import override
from expertflow.plan.records import TrainPlan
from expertflow.stage.copy import ensure_staged
from expertflow.stage.records import StagingRecord
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.tokens.records import PackingRecord
from expertflow.train import checkpoint, processes, publish
from expertflow.train.assemble import Assignment
from expertflow.train.expert import train_expert
from expertflow.train.on_the_fly import Documents
from expertflow.train.preflight import preflight
from expertflow.train.records import ModelRecord
from expertflow.train.replay import replay_step
from expertflow.train.run import Diverged
from expertflow.train.watch import watched

DIVERGED, PLAN, PREFLIGHT = "diverged.txt", "plan.json", "preflight.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """Paths of one job: records to read, the state, what to publish."""

    plan: Path
    packing: Path
    model: Path
    staging: Path
    state: Path
    checkpoint: Path
    output: Path
    code: str
    changes: dict[str, Any] = field(default_factory=dict)
    documents: Documents | None = None


def run_job(job: TrainingJob) -> bool:
    """Bring the job's state to its end and publish it; false in a process that only helps.

    Raises:
        Interrupted: a signal came; the state is saved.
        TrainingError, HardwareError: the run cannot go on.
    """
    assignment, packing = _assignment(job)
    plan, model, state = assignment.plan, assignment.model, assignment.state
    if processes.is_helper():
        _help(assignment)
        return False
    with checkpoint.locked(state):
        outcome = publish.read_outcome(state) or _train(assignment, packing)
        outputs = {"checkpoint": job.checkpoint}
        for file in ("steps.jsonl", "gpu.jsonl", "monitor.json", PREFLIGHT):
            outputs[file] = job.output.with_name(file)
        publish.publish(state, outputs)
        record = publish.training_record(
            plan=plan,
            packing=packing,
            model=model,
            outcome=outcome,
            outputs=outputs,
            fingerprint=state.name,
            on_the_fly=assignment.documents is not None,
        )
    write_record(job.output, record)
    return True


def replay_job(job: TrainingJob, number: int) -> Iterator[str]:
    """Look at one step of the job again; give lines to read.

    The job's state has to be that of one run, which keeps the plan it was made by: settings given
    with the request have no say. In several processes, the first one's micro-batches are told.

    Raises:
        TrainingError: it is not.
    """
    if not (job.state / PLAN).is_file():
        raise TrainingError(
            f"{job.state}: is no state of a run; give the one that the message names, as"
            " --state state/EXPERT/NAME"
        )
    assignment, _ = _assignment(replace(job, plan=job.state / PLAN, changes={}))
    assignment = replace(assignment, state=job.state)
    if processes.is_helper():
        list(replay_step(assignment, processes.start(assignment.plan), number))
        return
    with checkpoint.locked(job.state):
        yield from replay_step(assignment, processes.start(assignment.plan), number)


def _assignment(job: TrainingJob) -> tuple[Assignment, PackingRecord]:
    """Read what the job is made from; with several processes planned, become their launcher."""
    packing = read_record(PackingRecord, job.packing)
    model = read_record(ModelRecord, job.model)
    plan = read_record(TrainPlan, job.plan)
    plan = override(plan, job.changes, packing=packing, facts=model.facts)
    processes.relaunch(plan.world_size)
    rows, documents = _data(job)
    how = job.code
    if documents is not None:
        plan, how = documents.planned(plan), f"{how}, on the fly, {documents.sha256}"
    name = publish.fingerprint(plan=plan, packing=packing, model=model, code=how)
    assignment = Assignment(
        plan=plan, model=model, rows=rows, state=job.state / name, documents=documents
    )
    return assignment, packing


def _train(assignment: Assignment, packing: PackingRecord) -> dict[str, Any]:
    """Train to the end; a run that diverged once is not paid for again by every retry."""
    plan, state = assignment.plan, assignment.state
    _refuse_diverged(state)
    on_the_fly = assignment.documents is not None
    if not on_the_fly:
        publish.check_inputs_unmoved(packing, assignment.rows)
    checkpoint.remove_partials(state)
    rows = None if on_the_fly else assignment.rows / "train" / ROWS_FILE
    readings = preflight(plan, state, rows)
    write_record(state / PLAN, plan)
    write_text(state / PREFLIGHT, json.dumps(readings, indent=2) + "\n")
    try:
        seen_s = checkpoint.last_seen_s(state)
        with watched(state, plan, seen_s=seen_s):
            group = processes.start(plan, tracker_directory=str(state))
            outcome = train_expert(replace(assignment, seen_s=seen_s), group)
    except Diverged as error:
        write_text(state / DIVERGED, str(error))
        raise
    try:
        if not on_the_fly:
            publish.check_inputs_unmoved(packing, assignment.rows)
    except TrainingError:
        remove(state / "checkpoints")
        raise
    for key in ("versions", "gpu_name", "measured_peak_flops_per_s"):
        outcome[key] = readings[key]
    write_text(state / "outcome.json", json.dumps(outcome, indent=2) + "\n")
    return outcome


def _help(assignment: Assignment) -> None:
    """Do this process's share of a run that the first one publishes."""
    if publish.read_outcome(assignment.state) is None:
        _refuse_diverged(assignment.state)
        train_expert(assignment, processes.start(assignment.plan))


def _refuse_diverged(state: Path) -> None:
    verdict = state / DIVERGED
    if verdict.is_file():
        raise TrainingError(f"{verdict.read_text(encoding='utf-8')}; it is the same run again")


def _data(job: TrainingJob) -> tuple[Path, Documents | None]:
    """Give the rows' place, and the documents where there are no rows and the job may do without.

    Raises:
        TrainingError: the packed rows are missing.
    """
    staging = read_record(StagingRecord, job.staging)
    source = Path(staging.source)
    if all((source / split / ROWS_FILE).is_file() for split in ("train", "held_out")):
        return _rows(staging), None
    if job.documents is None:
        raise TrainingError(
            f"{source}: the packed rows are missing; run pack_sequences again, or give --shards and"
            " --keep to tokenise on the fly"
        )
    return source, job.documents


def _rows(staging: StagingRecord) -> Path:
    """Give the rows' place on this machine; a retry on another node stages again."""
    source = Path(staging.source)
    if staging.target is None:
        return source
    ensure_staged(source=source, target=Path(staging.target), sha256=staging.source_sha256)
    return Path(staging.target)
