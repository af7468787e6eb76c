"""Fingerprint what decides a training's weights; report what differs in unfinished trainings."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_json
from expertflow.core.records import read_record, to_json
from expertflow.core.settings import list_settings, name_of
from expertflow.plan.records import TrainPlan
from expertflow.plan.settings import LoraSpec, Training
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import ModelRecord
from expertflow.train.saved import checkpoint_files
from expertflow.train.saved.checkpoint_files import OUTCOME

log = logging.getLogger(__name__)
PLAN = "plan.json"
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
