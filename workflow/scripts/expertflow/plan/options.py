"""Compare the same global batch and method on other hardware, assuming perfect scaling."""

from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import ConfigError, HardwareError
from expertflow.hardware.gpu_table import gpu_by_name, is_ampere
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost import Band, Price, predict_hours, price_of, price_of_plan
from expertflow.plan.draft import PlanDraft
from expertflow.plan.memory import can_hold, choose_micro_batch, is_predicted_to_fit
from expertflow.plan.records import HardwareOption, TrainPlan
from expertflow.plan.step_time import bound_words
from expertflow.plan.switches import choose_parallel
from expertflow.train.optimizers import OPTIMIZERS


def compare_options(draft: PlanDraft, plan: TrainPlan) -> tuple[HardwareOption, ...]:
    """Return the planned hardware and the configured alternatives, in their order.

    Empty on a CPU: a card's peak does not predict the time of a CPU-sized model.
    """
    if plan.gpu is None:
        return ()
    options = [_planned(draft, plan)]
    for choice in draft.spec.compare:
        gpu = gpu_by_name(choice.name, draft.spec.gpu_table)
        if gpu is None:
            remark = "no such row in config/hardware/gpus.yaml"
            options.append(HardwareOption(name=choice.name, n_gpus=choice.n_gpus, remark=remark))
        elif (gpu.name, choice.n_gpus) != (plan.gpu.name, plan.world_size):
            options.append(_option(draft, plan, gpu, choice.n_gpus))
    return tuple(options)


def _planned(draft: PlanDraft, plan: TrainPlan) -> HardwareOption:
    cost = plan.cost
    fits = can_hold(draft.memory_total_bytes, plan.predicted_peak_bytes)
    remarks = {
        "as planned": True,
        "calibrated" if cost.calibrated else "prior": True,
        "not predicted to fit": fits is False,
        _sharing(plan.world_size): plan.world_size > 1 and not cost.calibrated,
        f"the {plan.precision} peak is unknown": cost.predicted_hours is None,
        "no price is configured": cost.predicted_hours is not None
        and cost.price_usd_per_hour is None,
    }
    hours = cost.predicted_hours_low, cost.predicted_hours, cost.predicted_hours_high
    return HardwareOption(
        name=plan.hardware,
        n_gpus=plan.world_size,
        fits=fits,
        micro_batch_size=plan.batch_size,
        checkpoint_activations=plan.gradient_checkpointing,
        **_priced(hours, price_of_plan(draft.spec, plan.gpu)),
        remark=_join(remarks),
    )


def _option(draft: PlanDraft, plan: TrainPlan, gpu: GpuFacts, n_gpus: int) -> HardwareOption:
    """Divide the work as the manifest does, or else by sharding the model."""
    reasons = []
    for parallel in dict.fromkeys((draft.spec.parallel, "fsdp")):
        # The manifest's micro-batch was for the planned card.
        spec = replace(
            draft.spec,
            batch_size=None,
            gradient_accumulation_steps=None,
            world_size=n_gpus,
            parallel=parallel,
        )
        is_shardable = OPTIMIZERS[spec.optim].is_shardable and spec.method != "qlora"
        may_share = n_gpus > 1 and is_shardable
        if parallel != draft.spec.parallel and not may_share:
            continue
        # With its own reasons, or it would overwrite the plan's.
        other = replace(draft, spec=spec, gpu=gpu, chosen={}, reasons={})
        try:
            choose_parallel(spec)
            largest, checkpoint = choose_micro_batch(other)
        except (HardwareError, ConfigError) as error:
            reasons.append(str(error).split(";")[0])
            continue
        return _lay_out(draft, other, plan, largest, checkpoint=checkpoint)
    priced = _priced((None, None, None), price_of(draft.spec, gpu, n_gpus))
    # The first reason is for the manifest's own way to divide the work.
    return HardwareOption(name=gpu.name, n_gpus=n_gpus, fits=False, **priced, remark=reasons[0])


def _lay_out(
    draft: PlanDraft, other: PlanDraft, plan: TrainPlan, largest: int, *, checkpoint: bool
) -> HardwareOption:
    spec, rows, n_gpus = other.spec, plan.global_batch_sequences, other.spec.world_size
    # Micro-batches that divide the global batch evenly.
    dividing = [m for m in range(1, largest + 1) if rows % (m * n_gpus) == 0]
    micro = max(dividing, default=max(1, min(largest, rows // n_gpus)))
    is_known = is_predicted_to_fit(other, micro, checkpoint=checkpoint) is not None
    there = replace(
        plan,
        gpu=other.gpu,
        world_size=n_gpus,
        parallel=spec.parallel,
        precision=other.precision,
        use_tf32=spec.use_tf32,
        batch_size=micro,
        gradient_accumulation_steps=max(1, -(-rows // (micro * n_gpus))),
        gradient_checkpointing=checkpoint,
    )
    hours, step, unknown = predict_hours(other, there)
    price = price_of(spec, other.gpu, n_gpus)
    # Only one of the two cards has the attention kernel that was traced.
    kinds = {is_ampere(card) for card in (plan.gpu, other.gpu) if card}
    is_odd_trace = bool(other.trace and other.trace.lines) and len(kinds) > 1
    remarks = {
        "parallel fsdp": spec.parallel != draft.spec.parallel,
        "checkpointing": checkpoint,
        f"{rows} rows a step do not divide evenly": not dividing,
        "its memory or the model's is unknown": not is_known,
        f"memory as traced for {plan.hardware}": is_odd_trace,
        unknown if step is None else bound_words(step): True,
        _sharing(n_gpus): n_gpus > 1,
        "prior, unlike the plan": plan.cost.calibrated,
        "no price in prices.yaml": price.usd_per_hour is None,
    }
    return HardwareOption(
        name=other.hardware,
        n_gpus=n_gpus,
        fits=True if is_known else None,
        micro_batch_size=micro,
        checkpoint_activations=checkpoint,
        **_priced(hours, price),
        remark=_join(remarks),
    )


def _priced(hours: Band, price: Price) -> dict[str, Any]:
    rate = {"usd_per_hour": price.usd_per_hour, "price_as_of": price.as_of}
    return rate | price.band(hours)


def _join(remarks: dict[str, bool]) -> str:
    return "; ".join(remark for remark, applies in remarks.items() if applies)


def _sharing(n_gpus: int) -> str:
    return f"{n_gpus} cards assumed to share perfectly"
