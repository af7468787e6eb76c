"""Say what a calibration holds for, and whether it is this plan's."""

from expertflow.plan.cost_records import Calibration
from expertflow.plan.records import TrainPlan


def calibration_key(plan: TrainPlan, model_type: str) -> str:
    """Name what decides how long a step of a plan takes, in words that can be compared."""
    lora = plan.lora
    adapter = "" if lora is None else f" r {lora.r}{' DoRA' if lora.use_dora else ''}"
    parts = (
        plan.hardware,
        f"{plan.world_size} x {plan.parallel}" if plan.world_size > 1 else "1 process",
        f"{model_type} of {plan.n_params_total:,} parameters",
        f"{plan.method}{adapter}",
        plan.optim,
        f"rows of {plan.sequence_length_tokens} tokens",
        f"{plan.batch_size} x {plan.gradient_accumulation_steps} rows a step",
        plan.precision,
        f"attention {plan.attention}",
        f"compiled {plan.torch_compile}",
        f"checkpointing {plan.gradient_checkpointing}",
        f"threads {plan.n_threads}",
    )
    return "; ".join(parts)


def usable(calibration: Calibration | None, key: str) -> tuple[Calibration | None, str | None]:
    """Give the calibration where it is of this plan, else null and why it is left out."""
    if calibration is None or calibration.key == key:
        return calibration, None
    theirs, ours = calibration.key.split("; "), key.split("; ")
    other = next((t for t, o in zip(theirs, ours, strict=False) if t != o), calibration.key)
    return None, f"the calibration that is there is of another run ({other}) and is left out"
