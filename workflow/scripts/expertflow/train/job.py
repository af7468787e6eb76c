"""The training job: lock the state, watch the machine, train or find it done, publish."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import replace

from expertflow.core.errors import TrainingError
from expertflow.core.files import remove, write_text
from expertflow.core.records import Record, read_record, to_json, write_record
from expertflow.plan.override import override
from expertflow.plan.records import TrainPlan
from expertflow.staging.ensure import Places, staged
from expertflow.staging.records import StagingRecord
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.tokens.records import PackingRecord
from expertflow.train import processes, publish
from expertflow.train.assemble import Assignment
from expertflow.train.expert import train_expert
from expertflow.train.feed.on_the_fly import Documents
from expertflow.train.preflight import preflight
from expertflow.train.profile.files import PROFILE, publish_profile
from expertflow.train.records import ModelRecord
from expertflow.train.run import Diverged
from expertflow.train.saved import agree, checkpoint_files
from expertflow.train.saved import lock as state_lock
from expertflow.train.watch import watched

DIVERGED, PLAN, PREFLIGHT = "diverged.txt", "plan.json", "preflight.json"


class TrainingJob(Record, frozen=True, kw_only=True):
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
    word = agree.Word()
    if processes.is_helper():
        _help(job, assignment, word)
        return False
    with state_lock.locked(state):
        outcome = publish.read_outcome(state)
        if outcome is None:
            _refuse_diverged(state)
            # A launcher holds no lock: its first process looks again, when it has it.
            processes.relaunch(plan.world_size)
        word.give(go_on=outcome is None)
        outcome = outcome or _train(job, assignment, packing)
        outputs = {"checkpoint": job.checkpoint}
        for file in publish.LOGS:
            outputs[file] = job.output.with_name(file)
        publish.publish(state, outputs)
        publish_profile(
            state, job.output.with_name(PROFILE), n_wanted=plan.profile_steps, outcome=outcome
        )
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


def _assignment(job: TrainingJob) -> tuple[Assignment, PackingRecord]:
    """Read what the job is made from."""
    processes.stop_with_launcher()
    packing = read_record(PackingRecord, job.packing)
    model = read_record(ModelRecord, job.model)
    plan = read_record(TrainPlan, job.plan)
    plan = override(plan, job.changes, packing=packing, facts=model.facts)
    rows, documents = _data(job)
    how = job.code
    if documents is not None:
        plan, how = documents.planned(plan), f"{how}, on the fly, {documents.sha256}"
    name = publish.fingerprint(plan=plan, packing=packing, model=model, code=how)
    assignment = Assignment(
        plan=plan, model=model, rows=rows, state=job.state / name, documents=documents
    )
    return assignment, packing


def _train(job: TrainingJob, assignment: Assignment, packing: PackingRecord) -> dict[str, Any]:
    """Train to the end."""
    checkpoint_files.remove_partials(assignment.state)
    with _placed(job, assignment) as (placed, places):
        return _train_there(placed, packing, places)


def _train_there(assignment: Assignment, packing: PackingRecord, places: Places) -> dict[str, Any]:
    """Train from where rows and weights are read on this machine."""
    plan, state = assignment.plan, assignment.state
    on_the_fly = assignment.documents is not None
    if not on_the_fly:
        publish.check_inputs_unmoved(packing, assignment.rows)
    rows = None if on_the_fly else assignment.rows / "train" / ROWS_FILE
    readings = preflight(plan, state, rows) | {"staging": _noted(places)}
    write_record(state / PLAN, plan)
    write_record(state / PREFLIGHT, readings)
    try:
        seen_s = checkpoint_files.last_seen_s(state)
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
    publish.write_outcome(state, outcome)
    return outcome


def _help(job: TrainingJob, assignment: Assignment, word: agree.Word) -> None:
    """Do this process's share of a run that the first one publishes, if it says that there is one.

    That one waits for the lock, and reads what is finished to the byte.
    """
    if word.wait():
        with _placed(job, assignment) as (placed, _):
            train_expert(placed, processes.start(placed.plan))


def _refuse_diverged(state: Path) -> None:
    """Let no retry pay once more for a run that diverged."""
    verdict = state / DIVERGED
    if verdict.is_file():
        raise TrainingError(f"{verdict.read_text(encoding='utf-8')}; it is the same run again")


def _data(job: TrainingJob) -> tuple[Path, Documents | None]:
    """Give the rows' place, and the documents where there are no rows and the job may do without.

    Raises:
        TrainingError: the packed rows are missing.
    """
    source = Path(read_record(StagingRecord, job.staging).rows.source)
    if all((source / split / ROWS_FILE).is_file() for split in ("train", "held_out")):
        return source, None
    if job.documents is None:
        raise TrainingError(
            f"{source}: the packed rows are missing; run pack_sequences again, or give --shards and"
            " --keep to tokenise on the fly"
        )
    return source, job.documents


@contextmanager
def _placed(job: TrainingJob, assignment: Assignment) -> Iterator[tuple[Assignment, Places]]:
    """Have rows and weights where this machine reads them fastest; a retry may be on another."""
    record = read_record(StagingRecord, job.staging)
    sha256, with_rows = assignment.model.weights_sha256, assignment.documents is None
    with staged(record, weights_sha256=sha256, with_rows=with_rows) as places:
        yield replace(assignment, rows=places.rows, weights=places.weights), places


def _noted(places: Places) -> dict[str, Any]:
    """Give what the report shows: from where this run read, and why."""
    return {note.kind: to_json(note) for note in places.staged}
