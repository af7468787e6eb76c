"""The training job: lock the state, monitor the machine, train if needed, publish.

Training is read in this order: job, run, loop, step_hooks, publish.
"""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from msgspec import field
from msgspec.structs import asdict, replace

from expertflow.core.attempts import note_state, process_age_s
from expertflow.core.errors import DataError, TrainingError
from expertflow.core.files import remove, sha256_json, write_text
from expertflow.core.process import end_with_parent, stop_group
from expertflow.core.progress import show_activity
from expertflow.core.records import Record, read_record, to_json, write_record, write_sealed
from expertflow.core.settings import list_settings, name_of
from expertflow.hardware.monitor import write_missing_record
from expertflow.plan.override import Changes, override
from expertflow.plan.records import TrainPlan
from expertflow.plan.settings import LoraSpec, Training
from expertflow.staging.ensure import Places, open_staged
from expertflow.staging.records import StagingRecord
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.tokens.records import PackingRecord
from expertflow.train import loop, memory, processes, publish
from expertflow.train.device import configure_allocator
from expertflow.train.feed.on_the_fly import Documents
from expertflow.train.model.weights import Diverged
from expertflow.train.preflight import run_preflight
from expertflow.train.processes import Processes
from expertflow.train.profiler import PROFILE, publish_profile
from expertflow.train.records import ModelRecord, RunSummary, TrainingRecord
from expertflow.train.run import TrainInputs, stop_on_signals
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.checkpoint import Saver
from expertflow.train.saved.checkpoint_files import OUTCOME, lock_state
from expertflow.train.start import assemble_run, try_batches
from expertflow.train.step_hooks import STEPS_FILE, truncate_log

log = logging.getLogger(__name__)
DIVERGED, PREFLIGHT, PLAN = "diverged.txt", "preflight.json", "plan.json"
MONITOR = Path(__file__).resolve().parents[2] / "monitor_gpu.py"
SAMPLES, MONITOR_RECORD = "gpu.jsonl", "monitor.json"
# Time for the monitor to write its last samples and the summary.
STOP_S = 60
# Fields of a plan besides its settings that do not affect the trained weights. A run that lost its
# card may resume on another one, which at most rounds differently.
_OTHER_FIELDS = (
    "origins", "cost", "reasons", "gpu", "predicted_peak_bytes", "predicted_peak_reason", "memory",
    "options", "claims", "may_halve_micro_batch", "predicted_tokens", "next_micro_batch_peak_bytes",
    "without_checkpointing_peak_bytes", "flops_per_token_model", "flops_per_token_hardware",
    "flops_convention", "hardware",
)  # fmt: skip
# Settings that do not affect them either, that the plan converts to step counts, or that only
# divide a global batch, so that another number of processes can resume (rounding and dropout masks
# aside).
_OTHER_SETTINGS = tuple(s.name for s in list_settings(Training) if "weights" not in s.affects)


class TrainingJob(Record, frozen=True, kw_only=True):
    plan: Path
    packing: Path
    model: Path
    staging: Path
    state: Path
    checkpoint: Path
    output: Path
    code: str
    changes: Changes = field(default_factory=dict)
    documents: Documents | None = None


def run_job(job: TrainingJob) -> bool:
    """Finish the job's state and publish it; return False in a helper process."""
    if processes.RANK in os.environ:
        # A launcher puts each process in its own session, out of reach of a signal to its group.
        end_with_parent()
    packing = read_record(PackingRecord, job.packing)
    inputs = _read_inputs(job, packing)
    plan, state = inputs.plan, inputs.state
    if plan.gpu is not None:
        configure_allocator()
    decision = processes.RankZeroDecision()
    if os.environ.get(processes.RANK, "0") != "0":
        # Rank 0 waits for the lock and verifies finished results byte by byte.
        if decision.wait():
            with _staged(job, inputs) as (placed, _):
                train_expert(placed, processes.start_processes(plan))
        return False
    # A second trainer of the same run waits here, and then finds the run finished or resumes it.
    with lock_state(state):
        summary = publish.read_outcome(state)
        if summary is None:
            # A diverged run must not cost another retry.
            if (state / DIVERGED).is_file():
                why = (state / DIVERGED).read_text(encoding="utf-8")
                raise TrainingError(f"{why}; this run would repeat it")
            # A launcher holds no lock: its rank 0 checks again once it has it.
            processes.launch_processes(plan.world_size)
        note_state(state, is_done=summary is not None)
        decision.announce(go_on=summary is None)
        summary = summary or _train(job, inputs, packing)
        publish.publish_results(state, checkpoint=job.checkpoint, folder=job.output.parent)
        profile, n_wanted = job.output.with_name(PROFILE), plan.profile_steps
        publish_profile(state, profile, device=summary.device, n_wanted=n_wanted)
        readings = json.loads((state / PREFLIGHT).read_text(encoding="utf-8"))
    record = TrainingRecord(
        **asdict(summary),
        gpu_name=readings["gpu_name"],
        measured_peak_flops_per_s=readings["measured_peak_flops_per_s"],
        versions=readings["versions"],
        on_the_fly=inputs.documents is not None,
        packing_sha256=sha256_json([packing.train.sha256, packing.held_out.sha256]),
        steps_path=str(job.output.with_name(STEPS_FILE)),
    )
    write_record(job.output, record)
    return True


def _read_inputs(job: TrainingJob, packing: PackingRecord) -> TrainInputs:
    model = read_record(ModelRecord, job.model)
    plan = read_record(TrainPlan, job.plan)
    plan = override(plan, job.changes, packing=packing, facts=model.facts)
    rows = Path(read_record(StagingRecord, job.staging).rows.source)
    documents, code = None, job.code
    if not all((rows / split / ROWS_FILE).is_file() for split in ("train", "held_out")):
        documents = job.documents
        if documents is None:
            raise TrainingError(
                f"{rows}: the packed rows are missing; run pack_sequences again, or pass --shards"
                " and --keep to tokenize on the fly"
            )
        plan, code = documents.adapt_plan(plan), f"{code}, on the fly, {documents.sha256}"
    name = fingerprint_run(plan=plan, packing=packing, model=model, code=code)
    return TrainInputs(
        plan=plan, model=model, rows=rows, state=job.state / name, documents=documents
    )


def fingerprint_run(
    *, plan: TrainPlan, packing: PackingRecord, model: ModelRecord, code: str
) -> str:
    """Hash everything that decides the trained weights; prices and predictions do not."""
    rows = [packing.train.sha256, packing.held_out.sha256]
    weights = [model.weights_sha256, model.tokenizer.sha256]
    return sha256_json([_weight_settings(plan), rows, weights, code])[:20]


def _weight_settings(plan: TrainPlan) -> dict[str, Any]:
    decided: dict[str, Any] = to_json(plan)
    for key in (*_OTHER_FIELDS, *_OTHER_SETTINGS):
        decided.pop(key)
    # The hash of an adapter to continue from counts, not its path.
    (decided[name_of(Training.lora)] or {}).pop(name_of(LoraSpec.init_from), None)
    return decided


def warn_of_unused_progress(plan: TrainPlan, state: Path) -> None:
    """Warn of the expert's unfinished trainings that this one, at its first step, cannot resume."""
    if checkpoint_files.newest_checkpoint(state) is not None:
        return
    wanted = _weight_settings(plan)
    for other in sorted(path for path in state.parent.iterdir() if path.is_dir() and path != state):
        newest = checkpoint_files.newest_checkpoint(other)
        if newest is None or (other / OUTCOME).is_file():
            continue
        differs = "different data, model or code"
        # A plan of another version may lack fields; its settings are not compared.
        with suppress(DataError):
            there = _weight_settings(read_record(TrainPlan, other / PLAN))
            settings = wanted.keys() & Training.__struct_fields__
            if changed := sorted(key for key in settings if wanted[key] != there[key]):
                differs = ", ".join(f"{key} {there[key]}, now {wanted[key]}" for key in changed)
        log.warning(
            "%s: an unfinished training at step %d is not resumed: %s",
            other, checkpoint_files.step_of(newest), differs,
        )  # fmt: skip


def _train(job: TrainingJob, inputs: TrainInputs, packing: PackingRecord) -> RunSummary:
    plan, state = inputs.plan, inputs.state
    checkpoint_files.remove_partials(state)
    warn_of_unused_progress(plan, state)
    with _staged(job, inputs) as (placed, places):
        rows = None
        if placed.documents is None:
            rows = placed.rows / "train" / ROWS_FILE
            publish.check_inputs_unmoved(packing, placed.rows)
        staging = {note.kind: to_json(note) for note in places.staged}
        merged = (job.output.parent, inputs.model.n_weight_bytes)
        readings = run_preflight(plan, state, rows, merged) | {"staging": staging}
        # Read again only to report which settings differ, if this run remains unfinished.
        write_sealed(state / PLAN, plan)
        write_record(state / PREFLIGHT, readings)
        with run_monitor(state, plan, seen_s=placed.seen_s):
            group = processes.start_processes(plan, tracker_directory=str(state))
            try:
                summary = train_expert(placed, group)
            except Diverged as error:
                # Before waiting for the monitor, during which a launcher ends this process.
                write_text(state / DIVERGED, str(error))
                raise
        try:
            # Rows are memory-mapped, so an in-place edit takes effect during a run.
            if rows is not None:
                publish.check_inputs_unmoved(packing, placed.rows)
        except TrainingError:
            # A retry must not resume weights that saw two versions of the rows.
            remove(state / "checkpoints")
            raise
        publish.write_outcome(state, summary)
    return summary


@contextmanager
def _staged(job: TrainingJob, inputs: TrainInputs) -> Iterator[tuple[TrainInputs, Places]]:
    """Stage rows and weights where this machine reads them fastest; a retry may run elsewhere."""
    record = read_record(StagingRecord, job.staging)
    sha256, with_rows = inputs.model.weights_sha256, inputs.documents is None
    with open_staged(record, weights_sha256=sha256, with_rows=with_rows) as places:
        seen_s = checkpoint_files.last_seen_s(inputs.state)
        yield replace(inputs, rows=places.rows, weights=places.weights, seen_s=seen_s), places


def train_expert(inputs: TrainInputs, processes: Processes) -> RunSummary:
    """Train to the end and leave the model in ``state/final``.

    If memory runs out and the plan allows it, continue from the last checkpoint with half the
    micro-batch. Raises Interrupted after a signal; run again to resume.
    """
    first = True
    with stop_on_signals() as stop:
        while True:
            # Read from disk, so that a later session does not run out of memory at the same step
            # again.
            plan = memory.apply_oom_retries(inputs.plan, inputs.state)
            # All ranks use what rank 0 read.
            [micro, n_accumulation], *_ = processes.of_all(
                plan.batch_size, plan.gradient_accumulation_steps
            )
            plan = replace(plan, batch_size=micro, gradient_accumulation_steps=n_accumulation)
            try:
                return _attempt(replace(inputs, plan=plan, since_start=first), processes, stop)
            except memory.OutOfMemory as error:
                memory.note_retry(plan, inputs.state, error)
            # The error's tensors are unreferenced only here, after the except block; and the failed
            # attempt's peak is not the run's.
            first = False
            processes.accelerator.free_memory()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def _attempt(inputs: TrainInputs, processes: Processes, stop: Callable[[], bool]) -> RunSummary:
    state = inputs.state
    with Saver(state, keep=inputs.plan.save_total_limit) as saver:
        last = checkpoint.agree_on(checkpoint_files.newest_checkpoint(state), state, processes)
        what = f"loading{' and compiling' * inputs.plan.torch_compile} {inputs.model.name}"
        log.info("%s", what)
        with show_activity(lambda: what):
            run = assemble_run(inputs, processes=processes, saver=saver, stop=stop, directory=last)
            # Steps logged after the checkpoint are repeated, and would appear twice.
            truncate_log(run)
            try_batches(run)
        loop.train(run)
        return publish.finish_run(run)


@contextmanager
def run_monitor(state: Path, plan: TrainPlan, *, seen_s: float) -> Iterator[None]:
    """Monitor the block on the run's clock, which was at ``seen_s``.

    If the monitor fails, the run continues and the record lists what is missing.
    """
    # An earlier session's record must not pass for this one's.
    (state / MONITOR_RECORD).unlink(missing_ok=True)
    # In a new session, so that a Ctrl-C for the trainer does not end it before the last sample. It
    # ends when the trainer is killed, and keeps none of its pipes open until then.
    command = [sys.executable, str(MONITOR), "--quiet"]
    command += ["--with-parent", str(os.getpid()), "--n-gpus", str(plan.world_size)]
    command += ["--samples", str(state / SAMPLES), "--output", str(state / MONITOR_RECORD)]
    command += ["--zero", repr(time.time() - process_age_s() - seen_s)]
    command += ["--go-on"] if seen_s > 0 else []
    command += ["--steps", str(state / STEPS_FILE)]
    command += ["--steps-per-epoch", str(plan.n_steps_per_epoch)]
    if plan.collection_interval_seconds is not None:
        command += ["--interval", str(plan.collection_interval_seconds)]
    silent = subprocess.DEVNULL
    monitor = subprocess.Popen(command, start_new_session=True, stdout=silent, stderr=silent)
    try:
        yield
    finally:
        stop_group(monitor, patience_s=STOP_S, signals=[signal.SIGTERM])
    (state / SAMPLES).touch()
    if not (state / MONITOR_RECORD).is_file():
        write_missing_record(
            state / MONITOR_RECORD,
            state / SAMPLES,
            configured_s=plan.collection_interval_seconds,
            reason="the monitor exited without a summary",
        )
