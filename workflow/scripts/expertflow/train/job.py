"""The training job: lock the state, watch the machine, train or find it done, publish."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from expertflow.core.errors import TrainingError
from expertflow.core.files import remove, write_text
from expertflow.core.records import read_record, write_record
from expertflow.hardware.monitor import read_samples, summarise
from expertflow.hardware.records import MonitorRecord
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

MONITOR = Path(__file__).resolve().parents[2] / "monitor_gpu.py"
MONITOR_STOP_S = 60
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
            monitor=read_record(MonitorRecord, state / "monitor.json"),
            outcome=outcome,
            outputs=outputs,
            fingerprint=state.name,
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
    readings = preflight(plan, state)
    write_record(state / PLAN, plan)
    write_text(state / PREFLIGHT, json.dumps(readings, indent=2) + "\n")
    try:
        with watched(state, interval_s=plan.collection_interval_seconds or 1.0):
            group = processes.start(plan, tracker_directory=str(state))
            outcome = train_expert(assignment, group)
    except Diverged as error:
        write_text(state / DIVERGED, str(error))
        raise
    try:
        if not on_the_fly:
            publish.check_inputs_unmoved(packing, assignment.rows)
    except TrainingError:
        remove(state / "checkpoints")
        raise
    outcome["versions"] = readings["versions"]
    outcome["measured_peak_flops_per_s"] = readings["measured_peak_flops_per_s"]
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


@contextmanager
def watched(state: Path, *, interval_s: float) -> Iterator[None]:
    """Run the monitor as a process of its own beside the block.

    A resumed run goes on with its file of samples, at the time where the last session ended. The
    monitor is a witness: if it fails, the run goes on, and the record says what is missing.
    """
    offset = checkpoint.last_seen_s(state)
    command = [sys.executable, str(MONITOR), "--interval", str(interval_s)]
    command += ["--samples", str(state / "gpu.jsonl"), "--offset", str(offset)]
    command += ["--output", str(state / "monitor.json"), "--quiet", "--with-parent"]
    # Its own session: a Ctrl-C meant for the trainer must not end it before the last sample. It
    # ends by itself when the trainer is killed, and keeps none of its pipes open until then.
    monitor = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        monitor.send_signal(signal.SIGTERM)
        try:
            monitor.wait(MONITOR_STOP_S)
        except subprocess.TimeoutExpired:
            monitor.kill()
            monitor.wait()
    _ensure_monitor_record(state, interval_s=interval_s)


def _ensure_monitor_record(state: Path, *, interval_s: float) -> None:
    """Leave a record even where the monitor left none: nulls, with the reason."""
    (state / "gpu.jsonl").touch()
    path = state / "monitor.json"
    if not path.is_file():
        record = summarise(read_samples(state / "gpu.jsonl"), interval_s=interval_s, device=None)
        reason = "the monitor ended without a summary"
        unavailable = dict.fromkeys(record.unavailable, reason)
        write_record(path, replace(record, unavailable=unavailable))


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
