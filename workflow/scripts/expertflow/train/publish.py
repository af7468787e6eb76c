"""End a run: choose its weights, store all candidates, summarize, and publish the results.

The published weights are at a folder's root; the others, equally complete, below ``steps``.
"""

import logging
from contextlib import nullcontext
from pathlib import Path

import torch

from expertflow.core.errors import DataError, TrainingError
from expertflow.core.files import (
    link_or_copy,
    link_or_copy_tree,
    remove,
    replacing,
    sha256_file,
    sync,
)
from expertflow.core.records import REPAIR, Record, fill_record, read_record, write_sealed
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.tokens.records import PackingRecord
from expertflow.train import memory
from expertflow.train.model.load import name_base
from expertflow.train.model.weights import gather_full, weights_sha256
from expertflow.train.records import (
    NOT_ON_CPU,
    EpochSummary,
    KeptWeights,
    RunSummary,
    SampledSteps,
    TimeSpent,
)
from expertflow.train.run import TrainingRun, TrainProgress
from expertflow.train.saved import checkpoint as checkpoints
from expertflow.train.saved import checkpoint_files
from expertflow.train.saved.checkpoint_files import (
    OUTCOME,
    WEIGHTS,
    Contents,
    find_difference,
    hash_contents,
)
from expertflow.train.timing import PARTS, is_sampled

log = logging.getLogger(__name__)

# Files of the run that are stored next to the model in results/.
LOGS = ("steps.jsonl", "gpu.jsonl", "monitor.json", "preflight.json")
BEHIND = "the device runs behind the host; see sampled_steps for the timed steps"


class FinishedRun(Record, frozen=True, kw_only=True):
    summary: RunSummary
    files: Contents


def check_inputs_unmoved(packing: PackingRecord, rows: Path) -> None:
    """Check the rows: Snakemake does not notice an input edited while a job runs."""
    for name, split in (("train", packing.train), ("held_out", packing.held_out)):
        if sha256_file(rows / name / ROWS_FILE) != split.sha256:
            raise TrainingError(f"{rows / name}: changed during training; {REPAIR}")


def finish_run(run: TrainingRun) -> RunSummary:
    if run.bar is not None:
        run.bar.close()
    published = choose_weights(run)
    with run.clock.part("checkpoint"):
        run.saver.wait()
        candidates = write_candidates(run, run.state / "final", published=published)
    with run.clock.part("other"):
        # It may wait for the network.
        for tracker in run.processes.accelerator.trackers:
            tracker.finish()
        run.processes.accelerator.trackers = []
    summary = summarize_run(run, published=published, candidates=candidates)
    run.processes.shutdown_process_group()
    return summary


def choose_weights(run: TrainingRun) -> int:
    best, step = run.progress.best, run.progress.step
    if not run.plan.load_best_model_at_end or best is None or best.step == step:
        return step
    run.saver.wait()
    run.processes.accelerator.wait_for_everyone()
    directory = checkpoints.agree_on(
        checkpoint_files.best_checkpoint(run.state), run.state, run.processes
    )
    if directory is None:
        log.warning("no checkpoint of the best weights is complete; publishing the last weights")
        return step
    found = checkpoint_files.step_of(directory)
    if found != best.step:
        log.warning("the checkpoint after step %d, the best one, is damaged", best.step)
    checkpoints.restore_weights(directory, model=run.net)
    log.info("publishing the weights after step %d, the best that were saved", found)
    return found


def write_candidates(run: TrainingRun, target: Path, *, published: int) -> tuple[KeptWeights, ...]:
    """Write the model's weights, those of step ``published``, and all other candidates.

    The folder appears atomically. The model has other weights afterwards. A collective.
    """
    losses = {point.step: point.loss for point in run.progress.eval_points}
    found: list[KeptWeights] = []

    def add(step: int, folder: Path, path: str) -> None:
        _export(run, folder / path)
        sha256 = weights_sha256(run.net)
        loss = losses.get(step)
        found.append(KeptWeights(step=step, held_out_loss=loss, path=path, weights_sha256=sha256))

    # Only rank 0 writes.
    writing = replacing(target) if run.processes.is_first else nullcontext(target)
    with writing as partial:
        add(published, partial, ".")
        for directory in _others(run, published):
            checkpoints.restore_weights(directory, model=run.net)
            step = checkpoint_files.step_of(directory)
            add(step, partial, f"steps/step-{step:08d}")
    return tuple(sorted(found, key=lambda candidate: candidate.step))


def _others(run: TrainingRun, published: int) -> list[Path]:
    """List the complete checkpoints but the published one, as rank 0 sees them. A collective."""
    own = []
    for directory in (
        checkpoint_files.complete_checkpoints(run.state) if run.processes.is_first else ()
    ):
        if checkpoint_files.step_of(directory) == published:
            continue
        # An earlier session may have written it, before a power cut.
        if found := checkpoint_files.find_damage(directory, contents=[WEIGHTS]):
            log.warning("%s is not a candidate: %s", directory, found)
        else:
            own.append(directory)
    [n], *_ = run.processes.of_all(len(own))
    agreed = (
        checkpoints.agree_on(own[i] if own else None, run.state, run.processes) for i in range(n)
    )
    return [directory for directory in agreed if directory is not None]


def _export(run: TrainingRun, target: Path) -> None:
    whole = None
    if run.plan.world_size > 1 and run.plan.parallel == "fsdp":
        # The adapter, or all weights, gathered from all processes. A head tied to the embedding has
        # a name in the state but no parameter.
        of_all = run.plan.lora is None
        wanted = {
            name
            for name, p in run.net.named_parameters(remove_duplicate=of_all)
            if p.requires_grad or of_all
        }
        state = run.net.state_dict()
        whole = {name: gather_full(t).cpu() for name, t in state.items() if name in wanted}
    if not run.processes.is_first:
        return
    target.mkdir(parents=True)
    run.net.save_pretrained(target, state_dict=whole, safe_serialization=True)
    name_base(target, run.model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        source = Path(run.model.path) / name
        if source.is_file():
            (target / name).write_bytes(source.read_bytes())
    if (template := run.model.tokenizer.layout.chat_template) is not None:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    (target / "README.md").unlink(missing_ok=True)


def publish_results(state: Path, *, checkpoint: Path, folder: Path) -> None:
    remove(checkpoint)
    link_or_copy_tree(state / "final", checkpoint)
    for name in LOGS:
        remove(folder / name)
        link_or_copy(state / name, folder / name)


def summarize_run(
    run: TrainingRun, *, published: int, candidates: tuple[KeptWeights, ...]
) -> RunSummary:
    plan, progress, on_cpu = run.plan, run.progress, run.device.type == "cpu"
    progress.note_device(run.device)
    return fill_record(
        RunSummary,
        progress,
        plan,
        fingerprint=run.state.name,
        device=run.device.type,
        activated=run.activated,
        n_threads=torch.get_num_threads(),
        n_steps=progress.step,
        n_epochs=progress.step / plan.n_steps_per_epoch,
        published_step=published,
        candidates=candidates,
        micro_batch_size=plan.batch_size,
        n_accumulation_steps=plan.gradient_accumulation_steps,
        memory_retries=memory.read_retries(run.state),
        sampled_steps=_mean_parts(**progress.sampled) if progress.sampled else None,
        epoch_summaries=_epoch_summaries(progress, plan.n_steps_per_epoch),
        time=_time_spent(run.clock.totals(), on_cpu=on_cpu),
        n_sessions=1 + len(progress.resumed_at_steps),
        checkpoint_write_s=run.saver.written_s,
        **progress.peaks,
        weights_sha256=next(c.weights_sha256 for c in candidates if c.step == published),
        unavailable=_unavailable(run),
    )


def _unavailable(run: TrainingRun) -> dict[str, str]:
    if run.device.type == "cpu":
        names = (
            "peak_memory_allocated_bytes", "peak_memory_reserved_bytes", "time.gpu_idle_s",
            "time.h2d_s",
        )  # fmt: skip
        missing = dict.fromkeys(names, NOT_ON_CPU)
    else:
        parts = ("forward_s", "backward_s", "optimizer_s", "gpu_idle_s")
        missing = {f"time.{name}": BEHIND for name in parts}
        missing["time.h2d_s"] = "copies overlap with compute; see sampled_steps"
    if not run.progress.sampled:
        is_profiled = run.plan.profile_steps and any(map(is_sampled, range(run.progress.step)))
        missing["sampled_steps"] = (
            "every step that would have been timed was profiled"
            if is_profiled
            else "the run had too few steps to time one"
        )
    return missing


def _mean_parts(steps: float, **parts: float) -> SampledSteps:
    return SampledSteps(n_steps=int(steps), **{f"{name}_s": parts[name] / steps for name in PARTS})


def _epoch_summaries(progress: TrainProgress, steps_per_epoch: int) -> tuple[EpochSummary, ...]:
    summaries = []
    epochs = sorted((int(key), sums) for key, sums in progress.epochs.items())
    for epoch, (n, loss_sum, tokens, seconds) in epochs:
        first, last = epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch
        losses = [p.loss for p in progress.eval_points if first < p.step <= last]
        summaries.append(
            EpochSummary(
                epoch=epoch + 1,
                steps=int(n),
                loss_mean=loss_sum / n,
                eval_loss=losses[-1] if losses else None,
                tokens=int(tokens),
                seconds=seconds,
                tokens_per_s=tokens / seconds,
            )
        )
    return tuple(summaries)


def _time_spent(clock: dict[str, float], *, on_cpu: bool) -> TimeSpent:
    """Split wall time; host times of a step's parts are meaningful only on a CPU."""
    parts = {
        f"{name}_s": clock.get(name, 0.0) for name in ("startup", "data_wait", "checkpoint", "eval")
    }
    train = clock.get("steps", 0.0) - parts["data_wait_s"]
    return TimeSpent(
        **parts,
        wall_s=clock["wall"],
        h2d_s=None,
        train_s=train,
        forward_s=clock.get("forward") if on_cpu else None,
        backward_s=clock.get("backward") if on_cpu else None,
        optimizer_s=clock.get("optimizer") if on_cpu else None,
        other_s=clock["wall"] - train - sum(parts.values()),
        gpu_idle_s=None,
    )


def write_outcome(state: Path, summary: RunSummary) -> None:
    for name in LOGS:
        # The mark of completion must not survive a power cut that these do not.
        sync(state / name)
    files = (path for path in (state / "final").rglob("*") if path.is_file())
    model = sorted(path.relative_to(state).as_posix() for path in files)
    made = hash_contents(state, [*model, *LOGS])
    write_sealed(state / OUTCOME, FinishedRun(summary=summary, files=made))


def read_outcome(state: Path) -> RunSummary | None:
    """Read a finished run's summary; return null if it is missing or no longer complete."""
    path = state / OUTCOME
    if not path.is_file():
        return None
    try:
        outcome = read_record(FinishedRun, path)
        sizes, digests = outcome.files["n_bytes"], outcome.files["xxh3"]
        found = find_difference(state, outcome.files, contents=digests)
        for name in LOGS:
            # There is no telling what a damaged log has lost.
            own: Contents = {"n_bytes": {name: sizes[name]}, "xxh3": digests}
            damage = find_difference(state, own, contents=[name])
            if damage is not None and (state / name).is_file():
                log.warning("removing %s: %s", state / name, damage)
                remove(state / name)
    except (DataError, KeyError) as error:
        found = f"{OUTCOME} cannot be read ({error})"
    if found is None:
        return outcome.summary
    log.warning("%s: %s; finishing the run again from its last checkpoint", state, found)
    return None
