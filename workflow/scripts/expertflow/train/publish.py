"""Lay a finished state out as declared results, and sum the run up as one record."""

import json
import logging
from pathlib import Path
from typing import Any

from expertflow.core.errors import TrainingError
from expertflow.core.files import (
    link_or_copy,
    link_or_copy_tree,
    remove,
    sha256_file,
    sha256_json,
    sync,
)
from expertflow.core.records import to_json, write_record
from expertflow.core.settings import list_settings
from expertflow.plan.records import TrainPlan
from expertflow.plan.settings import Training
from expertflow.tokens.arrow import ROWS_FILE
from expertflow.tokens.records import PackingRecord
from expertflow.train.candidates import candidates_of
from expertflow.train.profile.files import ASKED
from expertflow.train.records import (
    NOT_ON_CPU,
    EpochSummary,
    EvalPoint,
    MemoryRetry,
    ModelRecord,
    SampledSteps,
    SavePoint,
    TimeSpent,
    TrainingRecord,
)
from expertflow.train.saved.checkpoint_files import difference, fingerprints
from expertflow.train.timing import is_sampled

log = logging.getLogger(__name__)

OUTCOME = "outcome.json"
# The one key of outcome.json that is not the run's own.
FILES = "files"
# What lies beside the model in results/, and is the run's own.
LOGS = ("steps.jsonl", "gpu.jsonl", "monitor.json", "preflight.json")

# What a plan says besides its settings and leaves the trained weights as they are.
_SAID = (
    "origins", "cost", "reasons", "gpu", "predicted_peak_bytes", "predicted_peak_reason", "memory",
    "options", "claims", "may_halve_micro_batch", "predicted_tokens", "next_micro_batch_peak_bytes",
    "without_checkpointing_peak_bytes", "flops_per_token_model", "flops_per_token_hardware",
    "flops_convention",
)  # fmt: skip
# Settings that leave them, too, or that the plan turns into counts of steps, or, how a global batch
# is shared out, but for rounding and the random numbers of dropout: other processes can go on.
_UNDECIDED = tuple(s.name for s in list_settings(Training) if "weights" not in s.affects)


def fingerprint(*, plan: TrainPlan, packing: PackingRecord, model: ModelRecord, code: str) -> str:
    """Name everything that decides the trained weights; prices and predictions do not."""
    decided = to_json(plan)
    for key in (*_SAID, *_UNDECIDED):
        decided.pop(key)
    rows = [packing.train.sha256, packing.held_out.sha256]
    weights = [model.weights_sha256, model.tokenizer_sha256]
    return sha256_json([decided, rows, weights, code])[:20]


def check_inputs_unmoved(packing: PackingRecord, rows: Path) -> None:
    """Make sure that the rows that were trained on are those of the manifest.

    Snakemake does not notice an input that is edited while a job runs.

    Raises:
        TrainingError: they are not.
    """
    for name, split in (("train", packing.train), ("held_out", packing.held_out)):
        if sha256_file(rows / name / ROWS_FILE) != split.sha256:
            raise TrainingError(
                f"{rows / name}: changed during training; run again to train on what is there now"
            )


def publish(state: Path, outputs: dict[str, Path]) -> None:
    """Link the model and the logs of a finished state to their places in results/."""
    remove(outputs["checkpoint"])
    link_or_copy_tree(state / "final", outputs["checkpoint"])
    for name in LOGS:
        remove(outputs[name])
        link_or_copy(state / name, outputs[name])


def training_record(
    *,
    plan: TrainPlan,
    packing: PackingRecord,
    model: ModelRecord,
    outcome: dict[str, Any],
    outputs: dict[str, Path],
    fingerprint: str,
    on_the_fly: bool,
) -> TrainingRecord:
    """Sum up a finished run."""
    points = tuple(EvalPoint(**point) for point in outcome["eval_points"])
    on_cpu = outcome["device"] == "cpu"
    asked = ("peak_memory_allocated_bytes", "peak_memory_reserved_bytes", "time.gpu_idle_s")
    unavailable = dict.fromkeys(asked, NOT_ON_CPU) if on_cpu else _not_on_gpu()
    unavailable["time.h2d_s"] = (
        NOT_ON_CPU if on_cpu else "copies overlap with compute; see sampled_steps"
    )
    if outcome["sampled_steps"] is None:
        unavailable["sampled_steps"] = _why_none_timed(outcome)
    return TrainingRecord(
        expert=plan.expert,
        fingerprint=fingerprint,
        on_the_fly=on_the_fly,
        status="finished",
        method=plan.method,
        base_model=model.name,
        precision=plan.precision,
        attention=plan.attention,
        seed=plan.seed,
        n_params_total=plan.n_params_total,
        n_params_trainable=plan.n_params_trainable,
        n_epochs=outcome["n_steps"] / plan.n_steps_per_epoch,
        memory_retries=tuple(MemoryRetry(**entry) for entry in outcome["memory_retries"]),
        sampled_steps=SampledSteps(**sampled) if (sampled := outcome["sampled_steps"]) else None,
        eval_points=points,
        save_points=tuple(SavePoint(**point) for point in outcome["save_points"]),
        epoch_summaries=epoch_summaries(outcome["epochs"], points, plan.n_steps_per_epoch),
        time=time_spent(outcome["clock"], on_cpu=on_cpu),
        n_sessions=1 + len(outcome["resumed_at_steps"]),
        packing_sha256=sha256_json([packing.train.sha256, packing.held_out.sha256]),
        checkpoint_path=str(outputs["checkpoint"]),
        steps_path=str(outputs["steps.jsonl"]),
        gpu_path=str(outputs["gpu.jsonl"]),
        versions=outcome["versions"],
        unavailable=unavailable,
        activated=tuple(outcome["activated"]),
        candidates=candidates_of(outcome),
        resumed_at_steps=tuple(outcome["resumed_at_steps"]),
        **{key: outcome[key] for key in _SAME_NAMES},
    )


def _why_none_timed(outcome: dict[str, Any]) -> str:
    if outcome.get(ASKED) and any(is_sampled(step) for step in range(outcome["n_steps"])):
        return "every step that would be timed was one that the profiler watched"
    return "the run had too few steps for one to be timed"


_SAME_NAMES = (
    "started_at", "device", "gpu_name", "n_threads", "n_steps", "stopped_early_at_step",
    "published_step", "world_size", "micro_batch_size", "n_accumulation_steps",
    "checkpoint_write_s", "n_checkpoint_bytes", "n_tokens", "n_target_tokens", "n_padding_tokens",
    "loss_first", "loss_last", "n_saves", "peak_memory_allocated_bytes",
    "peak_memory_reserved_bytes", "peak_host_rss_bytes", "weights_sha256",
    "measured_peak_flops_per_s",
)  # fmt: skip


def epoch_summaries(
    epochs: dict[str, list[float]], points: tuple[EvalPoint, ...], steps_per_epoch: int
) -> tuple[EpochSummary, ...]:
    """Give one entry per epoch started; its held-out loss is the last one measured within it."""
    summaries = []
    for epoch, (n, loss_sum, tokens, seconds) in sorted((int(k), v) for k, v in epochs.items()):
        first, last = epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch
        losses = [p.loss for p in points if first < p.step <= last]
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


def time_spent(clock: dict[str, float], *, on_cpu: bool) -> TimeSpent:
    """Split wall time into its parts.

    Host times of forward, backward and optimizer mean something on a CPU only: a GPU runs behind.
    """
    parts = {name: clock.get(name, 0.0) for name in ("startup", "data_wait", "checkpoint", "eval")}
    train = clock.get("steps", 0.0) - parts["data_wait"]
    return TimeSpent(
        wall_s=clock["wall"],
        startup_s=parts["startup"],
        data_wait_s=parts["data_wait"],
        h2d_s=None,
        train_s=train,
        forward_s=clock.get("forward") if on_cpu else None,
        backward_s=clock.get("backward") if on_cpu else None,
        optimizer_s=clock.get("optimizer") if on_cpu else None,
        checkpoint_s=parts["checkpoint"],
        eval_s=parts["eval"],
        other_s=clock["wall"] - train - sum(parts.values()),
        gpu_idle_s=None,
    )


def write_outcome(state: Path, outcome: dict[str, Any]) -> None:
    """Note that a state is finished, and what its files then hold."""
    for name in LOGS:
        # The note must not survive a power cut that these do not.
        sync(state / name)
    made = fingerprints(state, [*_model_files(state), *LOGS])
    write_record(state / OUTCOME, {**outcome, FILES: made})


def read_outcome(state: Path) -> dict[str, Any] | None:
    """Read what a finished run left; null when there is none, or when it is not whole any more.

    Without it the run goes on from its last checkpoint, which makes the missing parts again.
    """
    path = state / OUTCOME
    if not path.is_file():
        return None
    try:
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = difference(state, outcome.pop(FILES), contents=True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{OUTCOME} cannot be read ({type(error).__name__}: {error})"
    if found is None:
        return outcome
    log.warning("%s: %s; the run is ended once more from its last checkpoint", state, found)
    return None


def _model_files(state: Path) -> list[str]:
    files = (path for path in (state / "final").rglob("*") if path.is_file())
    return sorted(path.relative_to(state).as_posix() for path in files)


def _not_on_gpu() -> dict[str, str]:
    reason = "the device runs behind the host; see sampled_steps for the steps that were timed"
    return dict.fromkeys(
        ("time.forward_s", "time.backward_s", "time.optimizer_s", "time.gpu_idle_s"), reason
    )
