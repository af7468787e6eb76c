"""Choose the weights that count, and write out all that a run still keeps, for the evaluation.

The published ones lie at the root of a folder, as anyone loads them; the others below ``steps``,
each as complete. Gathering shares is a collective: every process goes through the same list.
"""

import logging
from contextlib import nullcontext
from pathlib import Path

import torch

from expertflow.core.files import replacing
from expertflow.train.model.load import name_base
from expertflow.train.model.weights import gathered, weights_sha256
from expertflow.train.records import Candidate
from expertflow.train.run import Run
from expertflow.train.saved import checkpoint, checkpoint_files
from expertflow.train.saved.checkpoint_files import OURS, WEIGHTS

log = logging.getLogger(__name__)


def choose_weights(run: Run) -> int:
    """Load the best weights where they are asked for and are not the last; return their step."""
    best, step = run.progress.best, run.progress.step
    if not run.plan.load_best_model_at_end or best is None or best.step == step:
        return step
    run.saver.wait()
    run.processes.accelerator.wait_for_everyone()
    directory = checkpoint.agree_on(checkpoint_files.best(run.state), run.state, run.processes)
    if directory is None:
        log.warning("no checkpoint of the best weights is whole; the last ones count")
        return step
    found: int = checkpoint_files.read_progress(directory)["step"]
    if found != best.step:
        log.warning("the checkpoint after step %d, the best one, is damaged", best.step)
    checkpoint.restore_weights(directory, model=run.net)
    log.info("the weights after step %d are the best that were saved; they count", found)
    return found


def write_candidates(run: Run, target: Path, *, published: int) -> tuple[Candidate, ...]:
    """Write the model's weights, which are those of step ``published``, and all others kept.

    The folder appears whole or not at all. The model holds other weights afterwards. A collective.

    Raises:
        TrainingError: a checkpoint is of another model, or another process does not see it.
    """
    losses = {point.step: point.loss for point in run.progress.eval_points}
    found: list[Candidate] = []

    def add(step: int, folder: Path, path: str) -> None:
        _export(run, folder / path)
        sha256 = weights_sha256(run.net)
        loss = losses.get(step)
        found.append(Candidate(step=step, held_out_loss=loss, path=path, weights_sha256=sha256))

    # Only the first process writes.
    writing = replacing(target) if run.processes.is_first else nullcontext(target)
    with writing as partial:
        add(published, partial, ".")
        for directory in _others(run, published):
            checkpoint.restore_weights(directory, model=run.net)
            step = checkpoint_files.step_of(directory)
            add(step, partial, f"steps/step-{step:08d}")
    return tuple(sorted(found, key=lambda candidate: candidate.step))


def _others(run: Run, published: int) -> list[Path]:
    """List the whole checkpoints but the published one, as rank 0 sees them. A collective."""
    kept = checkpoint_files.complete(run.state) if run.processes.is_first else []
    own = [
        directory
        for directory in kept
        if checkpoint_files.step_of(directory) != published and _is_whole(directory)
    ]
    [n], *_ = run.processes.of_all(len(own))
    agreed = (
        checkpoint.agree_on(own[i] if own else None, run.state, run.processes) for i in range(n)
    )
    return [directory for directory in agreed if directory is not None]


def _is_whole(directory: Path) -> bool:
    """Read the weights of a checkpoint to the byte: this session may not have written them."""
    wanted = checkpoint_files.read_record(directory)[OURS]
    weights = {
        key: {name: value for name, value in wanted.get(key, {}).items() if name == WEIGHTS}
        for key in ("n_bytes", "xxh3")
    }
    found = checkpoint_files.difference(directory, weights, contents=True)
    if found is not None:
        log.warning("%s is no candidate: %s", directory, found)
    return found is None


def _export(run: Run, target: Path) -> None:
    whole = _whole(run) if run.plan.world_size > 1 and run.plan.parallel == "fsdp" else None
    if not run.processes.is_first:
        return
    target.mkdir(parents=True)
    run.net.save_pretrained(target, state_dict=whole, safe_serialization=True)
    name_base(target, run.model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        source = Path(run.model.path) / name
        if source.is_file():
            (target / name).write_bytes(source.read_bytes())
    (target / "README.md").unlink(missing_ok=True)


def _whole(run: Run) -> dict[str, torch.Tensor]:
    """Gather the adapter, or all weights, from the shares of all processes."""
    adapter = run.plan.lora is not None
    # A head that is tied to the embedding has a name in the state, and no parameter of its own.
    wanted = {n for n, p in run.net.named_parameters() if p.requires_grad or not adapter}
    state = run.net.state_dict()
    return {name: gathered(tensor).cpu() for name, tensor in state.items() if name in wanted}
