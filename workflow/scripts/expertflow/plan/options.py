"""Compare what the same work should take on other hardware, in hours and dollars.

The global batch and the method stay; the micro-batch is the largest that is predicted to fit. Cards
are taken to share the work perfectly, which they do not: the remark says so.
"""

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from expertflow.core.errors import ConfigError, HardwareError
from expertflow.core.records import Record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost import Price, peak_flops_per_s, price_of, prior_hours
from expertflow.plan.cost_records import USABLE_FRACTION, HardwareOption
from expertflow.plan.draft import Draft
from expertflow.plan.micro_batch import choose_micro_batch
from expertflow.plan.records import PlanSpec, Precision, TrainPlan
from expertflow.plan.switches import check_parallel, choose_precision
from expertflow.plan.work import work_of

# Compute capability from which on the variable-length attention kernel runs (Ampere).
KERNEL_MAJOR = 8


class Fit(Record, frozen=True, kw_only=True):
    """How the work would be laid out on other hardware; ``fits`` is null where nobody knows."""

    fits: bool | None
    precision: Precision
    micro_batch_size: int | None
    checkpoint_activations: bool | None
    remarks: tuple[str, ...]


def compare_options(
    draft: Draft, plan: TrainPlan, cards: dict[str, GpuFacts]
) -> tuple[HardwareOption, ...]:
    """Give the planned hardware and those to compare it with, in the order of the configuration.

    ``cards`` are known cards by the names that the configuration gives them. On a CPU there is
    nothing to compare: what a model that suits one takes on a card, its peak does not say.
    """
    if plan.gpu is None:
        return ()
    options = [_planned(plan)]
    for choice in draft.spec.compare:
        gpu = cards.get(choice.name)
        if gpu is None:
            options.append(_unknown(choice.name, choice.n_gpus))
        elif (gpu.name, choice.n_gpus) != (plan.gpu.name, plan.world_size):
            options.append(_option(draft, plan, gpu, choice.n_gpus))
    return tuple(options)


def _planned(plan: TrainPlan) -> HardwareOption:
    cost, total = plan.cost, plan.gpu.memory_total_bytes if plan.gpu else None
    known = plan.predicted_peak_bytes is not None and total is not None
    fits = (plan.predicted_peak_bytes or 0) <= USABLE_FRACTION * (total or 0) if known else None
    remarks = ["as planned", "calibrated" if cost.calibrated else "prior"]
    if fits is False:
        remarks.append("not predicted to fit")
    if plan.world_size > 1 and not cost.calibrated:
        remarks.append(_sharing(plan.world_size))
    if cost.predicted_hours is None:
        remarks.append(f"the {plan.precision} peak is not known")
    elif cost.price_usd_per_hour is None:
        remarks.append("no price is configured")
    return HardwareOption(
        name=plan.hardware,
        n_gpus=plan.world_size,
        fits=fits,
        micro_batch_size=plan.batch_size,
        checkpoint_activations=plan.gradient_checkpointing,
        hours=cost.predicted_hours,
        hours_low=cost.predicted_hours_low,
        hours_high=cost.predicted_hours_high,
        usd_per_hour=cost.price_usd_per_hour,
        price_as_of=cost.price_as_of,
        usd=cost.predicted_usd,
        usd_low=cost.predicted_usd_low,
        usd_high=cost.predicted_usd_high,
        remark="; ".join(remarks),
    )


def _option(draft: Draft, plan: TrainPlan, gpu: GpuFacts, n_gpus: int) -> HardwareOption:
    fit = _fit(draft, plan, gpu, n_gpus)
    price = price_of(draft.spec, gpu, n_gpus)
    remarks = [*fit.remarks]
    hours = None
    if fit.fits is not False:
        peak = peak_flops_per_s(gpu, fit.precision, use_tf32=draft.spec.use_tf32)
        if peak is None:
            remarks.append(f"its {fit.precision} peak is not known")
        work = work_of(draft, plan, fit.precision, checkpoint=bool(fit.checkpoint_activations))
        hours = prior_hours(work, None if peak is None else peak * n_gpus)
        if n_gpus > 1:
            remarks.append(_sharing(n_gpus))
        if plan.cost.calibrated:
            remarks.append("prior, unlike what is planned")
        if price.usd_per_hour is None:
            remarks.append("no price in prices.yaml")
    return _priced(gpu, n_gpus, fit, hours, price, "; ".join(remarks))


def _fit(draft: Draft, plan: TrainPlan, gpu: GpuFacts, n_gpus: int) -> Fit:
    """Lay the work out: as the manifest shares it, else in shares of the model."""
    reasons = []
    for parallel in dict.fromkeys((draft.spec.parallel, "fsdp")):
        spec = replace(
            draft.spec,
            batch_size=None,
            gradient_accumulation_steps=None,
            world_size=n_gpus,
            parallel=parallel,
        )
        if parallel != draft.spec.parallel and not _may_share(spec):
            continue
        precision, _ = choose_precision(spec, gpu)
        other = replace(draft, spec=spec, gpu=gpu, calibration=None, reasons=[])
        try:
            check_parallel(spec)
            micro, checkpoint = choose_micro_batch(other, precision)
        except (HardwareError, ConfigError) as error:
            reasons.append(str(error).split(";")[0])
            continue
        return _laid_out(other, plan, precision, micro, checkpoint, parallel != draft.spec.parallel)
    return Fit(
        fits=False,
        precision=plan.precision,
        micro_batch_size=None,
        checkpoint_activations=None,
        remarks=(reasons[0],),
    )


def _laid_out(
    other: Draft,
    plan: TrainPlan,
    precision: Precision,
    largest: int,
    checkpoint: bool,
    shared: bool,
) -> Fit:
    """Take the largest micro-batch that fits and divides the global batch."""
    rows, n_gpus = plan.global_batch_sequences, other.spec.world_size
    dividing = [m for m in range(1, largest + 1) if rows % (m * n_gpus) == 0]
    micro = max(dividing, default=max(1, min(largest, rows // n_gpus)))
    total = other.gpu.memory_total_bytes if other.gpu else None
    known = total is not None and other.peak_bytes(micro, precision, checkpoint) is not None
    remarks = ["parallel fsdp"] if shared else []
    remarks += ["checkpointing"] if checkpoint else []
    if not dividing:
        remarks.append(f"{rows} rows a step do not divide evenly")
    if not known:
        remarks.append("its memory or the model's is not known")
    if other.trace is not None and other.trace.lines and _routes_differ(plan.gpu, other.gpu):
        remarks.append(f"memory as traced for {plan.hardware}")
    return Fit(
        fits=True if known else None,
        precision=precision,
        micro_batch_size=micro,
        checkpoint_activations=checkpoint,
        remarks=tuple(remarks),
    )


def _routes_differ(one: GpuFacts | None, other: GpuFacts | None) -> bool:
    """Tell whether only one of two cards has the attention kernel, which is what was traced."""
    return _has_kernel(one) != _has_kernel(other)


def _has_kernel(gpu: GpuFacts | None) -> bool:
    capability = gpu.compute_capability if gpu else None
    return capability is None or int(capability.partition(".")[0]) >= KERNEL_MAJOR


def _may_share(spec: PlanSpec) -> bool:
    """Tell whether several cards could hold shares of the model."""
    return spec.world_size > 1 and spec.method != "qlora" and spec.optim != "adamw_8bit"


def _sharing(n_gpus: int) -> str:
    return f"{n_gpus} cards taken to share perfectly"


def _priced(
    gpu: GpuFacts,
    n_gpus: int,
    fit: Fit,
    hours: tuple[float, float, float] | None,
    price: Price,
    remark: str,
) -> HardwareOption:
    low, middle, high = hours or (None, None, None)
    return HardwareOption(
        name=gpu.name,
        n_gpus=n_gpus,
        fits=fit.fits,
        micro_batch_size=fit.micro_batch_size,
        checkpoint_activations=fit.checkpoint_activations,
        hours=middle,
        hours_low=low,
        hours_high=high,
        usd_per_hour=price.usd_per_hour,
        price_as_of=price.as_of,
        usd=price.usd(middle),
        usd_low=price.usd(low),
        usd_high=price.usd(high),
        remark=remark,
    )


def _unknown(name: str, n_gpus: int) -> HardwareOption:
    nothing = dict.fromkeys(
        ("hours", "hours_low", "hours_high", "usd_per_hour", "price_as_of", "usd", "usd_low",
         "usd_high", "fits", "micro_batch_size", "checkpoint_activations")
    )  # fmt: skip
    remark = "no such row in config/hardware/gpus.yaml"
    return HardwareOption(name=name, n_gpus=n_gpus, remark=remark, **nothing)


def options_table(plan: TrainPlan) -> str:
    """Lay the options out as text, the quickest and the cheapest marked; empty without any."""
    if not plan.options:
        return ""
    head = ("hardware", "fits", "rows", "time", "$/h", "dollars", "remark")
    rows = [head, *(_row(option, plan.options) for option in plan.options)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    return "\n".join("  ".join(_cells(row, widths)).rstrip() for row in rows)


def _cells(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    for i, width in enumerate(widths):
        yield row[i].ljust(width) if i < 2 else row[i].rjust(width)
    yield row[-1]


def _row(option: HardwareOption, options: tuple[HardwareOption, ...]) -> tuple[str, ...]:
    marks = []
    for key, word in (("hours", "quickest"), ("usd", "cheapest")):
        known = [o for o in options if o.fits is not False and getattr(o, key) is not None]
        # One alone is no comparison. Of equals, fewer cards: sharing is never perfect.
        best = min(known, key=lambda o: (round(getattr(o, key), 9), o.n_gpus), default=None)
        if len(known) > 1 and option is best:
            marks.append(word)
    fits = {True: "yes", False: "no", None: "unknown"}[option.fits]
    rate = "-" if option.usd_per_hour is None else f"{option.usd_per_hour:.2f}"
    return (
        f"{option.n_gpus} x {option.name}",
        fits,
        "-" if option.micro_batch_size is None else str(option.micro_batch_size),
        _band(short_time, option.hours, option.hours_low, option.hours_high),
        rate,
        _band(_usd, option.usd, option.usd_low, option.usd_high),
        "; ".join(filter(None, (*marks, option.remark))),
    )


def _usd(usd: float) -> str:
    return f"{usd:.2f}" if usd >= 0.1 else f"{usd:.2g}"


def _band(
    show: Callable[[float], str], middle: float | None, low: float | None, high: float | None
) -> str:
    if middle is None:
        return "-"
    band = "" if low is None or high is None else f" ({show(low)} to {show(high)})"
    return f"{show(middle)}{band}"


def short_time(hours: float) -> str:
    """Give hours in the unit that shows two digits of them."""
    if hours >= 1:
        return f"{hours:.2f} h"
    return f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.1f} s"
