"""Train an expert from its plan: load, resume, run, and say what happened.

All work happens in ``state``, a directory named by the fingerprint of everything that decides the
result. Snakemake deletes declared outputs when a job starts; the state outlives that, so a retry
resumes and a finished state is published again in seconds.
"""

import json
import logging
import resource
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from expertflow.core.files import read_json_lines, replacing, write_text
from expertflow.core.records import to_json
from expertflow.plan.records import LoaderPlan, TrainPlan
from expertflow.tokens.arrow import read_rows
from expertflow.train import checkpoint, loop
from expertflow.train.clock import Clock
from expertflow.train.load import DTYPES, add_adapter, load_base
from expertflow.train.loader import AnyFeed, feed_of
from expertflow.train.on_the_fly import Documents, read_on_the_fly
from expertflow.train.optimizer import make_optimizer
from expertflow.train.records import EvalPoint, ModelRecord
from expertflow.train.weights import weights_sha256

log = logging.getLogger(__name__)


def train_expert(
    *,
    plan: TrainPlan,
    model: ModelRecord,
    rows: Path,
    state: Path,
    documents: Documents | None = None,
) -> dict[str, Any]:
    """Train to the end in ``state`` and leave the model in ``state/final``.

    With ``documents`` these are tokenised in every step and the rows are not read. Returns what the
    training record needs beyond plan, packing and model.

    Raises:
        Interrupted: a signal came; run again to resume.
        TrainingError: the run cannot start or go on.
    """
    stop = catch_signals()
    device = torch.device("cuda" if plan.gpu is not None else "cpu")
    if documents is None:
        feed: AnyFeed = feed_of(plan, read_rows(rows / "train"))
        held_out = read_rows(rows / "held_out")
        data = f"pre-tokenised data from {rows}, {plan.n_sequences} rows"
    else:
        feed, held_out = read_on_the_fly(plan, model, documents)
        data = f"data tokenised on the fly, {rows} holds no packed rows"
    activated = (*activate(plan, device), data)
    clock, progress, directory = _last_progress(state)
    net = _load_model(plan, model, device)
    run = loop.Run(
        plan=plan,
        model=net,
        optimizer=make_optimizer(net, plan),
        scaler=torch.amp.GradScaler(device.type) if plan.precision == "fp16" else None,
        feed=feed,
        held_out=held_out,
        device=device,
        state=state,
        clock=clock,
        stop=stop,
        started_at=progress.get("started_at") or datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if directory is not None:
        _resume(run, directory, progress)
    (log.info if documents is None else log.warning)("%s", data)
    loop.train(run)
    _export(run, model, state / "final")
    return _outcome(run, activated)


def activate(plan: TrainPlan, device: torch.device) -> tuple[str, ...]:
    """Set threads, seeds and precision switches; say each in words."""
    if plan.n_threads is not None:
        torch.set_num_threads(plan.n_threads)
    torch.manual_seed(plan.seed)
    torch.backends.cuda.matmul.allow_tf32 = plan.use_tf32
    on_off = {True: "on", False: "off"}
    words = (
        f"device {device.type}, {torch.get_num_threads()} threads",
        f"dtype {plan.precision}",
        f"TF32 {on_off[plan.use_tf32]}",
        f"attention kernel {plan.attention}",
        f"activation checkpointing {on_off[plan.checkpoint_activations]}",
        f"optimizer {plan.optim}",
        f"method {plan.method}",
        f"loader {_loader_words(plan.loader)}",
    )
    for line in words:
        log.info(line)
    return words


def _loader_words(loader: LoaderPlan) -> str:
    if loader.kind == "thread":
        return f"thread, prefetch {loader.n_prefetch_batches}"
    if not loader.n_workers:
        return "in the trainer, no workers"
    kept = ", kept from epoch to epoch" if loader.persistent_workers else ""
    return f"{loader.n_workers} workers, prefetch {loader.n_prefetch_batches} each{kept}"


def catch_signals() -> Callable[[], bool]:
    """Make SIGTERM and SIGINT end the run after the current step; tell whether one came."""
    came: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: came.append(received))
    return lambda: bool(came)


def _last_progress(state: Path) -> tuple[Clock, dict[str, Any], Path | None]:
    """Find the newest checkpoint, if any; the clock goes on from where it was."""
    saved = checkpoint.complete(state)
    wall = {"wall": checkpoint.last_seen_s(state)}
    if not saved:
        (state / "steps.jsonl").unlink(missing_ok=True)
        return Clock(wall), {}, None
    progress = json.loads((saved[-1] / checkpoint.PROGRESS).read_text())
    return Clock(progress["clock"] | wall), progress, saved[-1]


def _load_model(plan: TrainPlan, model: ModelRecord, device: torch.device) -> Any:
    """Load the base, frozen under an adapter or trained as a whole."""
    # Trained weights stay in fp32 and are cast by autocast; a frozen base can be held in half.
    frozen = DTYPES[plan.precision] if plan.method != "full" else torch.float32
    net: Any = load_base(model.path, dtype=frozen, attention_name=plan.attention)
    if plan.checkpoint_activations:
        net.gradient_checkpointing_enable({"use_reentrant": False})
        net.enable_input_require_grads()
    if plan.lora is not None:
        net = add_adapter(net, plan.lora)
    return net.to(device)


def _resume(run: loop.Run, directory: Path, progress: dict[str, Any]) -> None:
    """Put model, optimiser, counters and the step log back to a checkpoint."""
    checkpoint.restore(directory, model=run.model, optimizer=run.optimizer, scaler=run.scaler)
    run.step = progress["step"]
    run.n_tokens, run.n_targets = progress["n_tokens"], progress["n_targets"]
    run.n_padding, run.n_saves = progress["n_padding"], progress["n_saves"]
    run.resumed_at = [*progress["resumed_at"], run.step]
    run.eval_points = [EvalPoint(**point) for point in progress["eval_points"]]
    run.epochs = {int(epoch): sums for epoch, sums in progress["epochs"].items()}
    run.loss_first, run.loss_last = progress["loss_first"], progress["loss_last"]
    steps = read_json_lines(run.state / "steps.jsonl")
    kept = [json.dumps(step) + "\n" for step in steps if step["step"] <= run.step]
    write_text(run.state / "steps.jsonl", "".join(kept))
    log.info("resumed after step %d from %s", run.step, directory)


def _export(run: loop.Run, model: ModelRecord, target: Path) -> None:
    """Write the trained model or adapter, with its tokenizer, as safetensors."""
    with run.clock.part("checkpoint"), replacing(target) as partial:
        partial.mkdir(parents=True)
        run.model.save_pretrained(partial, safe_serialization=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            source = Path(model.path) / name
            if source.is_file():
                (partial / name).write_bytes(source.read_bytes())
        (partial / "README.md").unlink(missing_ok=True)


def _outcome(run: loop.Run, activated: tuple[str, ...]) -> dict[str, Any]:
    cuda = run.device.type == "cuda"
    return {
        "started_at": run.started_at,
        "device": run.device.type,
        "activated": list(activated),
        "n_threads": torch.get_num_threads(),
        "n_tokens": run.n_tokens,
        "n_target_tokens": run.n_targets,
        "n_padding_tokens": run.n_padding,
        "eval_points": to_json(run.eval_points),
        "epochs": {str(epoch): sums for epoch, sums in run.epochs.items()},
        "loss_first": run.loss_first,
        "loss_last": run.loss_last,
        "clock": run.clock.totals(),
        "resumed_at_steps": run.resumed_at,
        "n_saves": run.n_saves,
        "peak_memory_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_memory_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_host_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "weights_sha256": weights_sha256(run.model),
    }
