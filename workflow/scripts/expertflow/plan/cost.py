"""Turn FLOPs into hours and hours into dollars, with a band.

Until a run on the same card has been measured, the band is what published bf16 training of 1-8B
dense models reaches: 20 to 45 % of the card's dense peak. Without a known peak there is no
estimate, and without a price no dollars.
"""

from expertflow.core.errors import ConfigError
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost_records import CostPlan
from expertflow.plan.records import PlanSpec

MFU_LOW, MFU_MIDDLE, MFU_HIGH = 0.20, 0.30, 0.45


def plan_cost(*, spec: PlanSpec, gpu: GpuFacts | None, flops: float) -> CostPlan:
    """Predict hours and dollars for ``flops`` model FLOPs on ``world_size`` cards of one kind.

    The cards are taken to share the work perfectly. ``price_usd_per_hour`` of the result is that of
    all of them together, so that wall time times price is what the run costs.

    Raises:
        ConfigError: the prediction is above the manifest's budget.
    """
    peak = gpu.peak_bf16_flops_per_s if gpu else None
    hours = [
        flops / (peak * spec.world_size * mfu) / 3600 if peak else None
        for mfu in (MFU_LOW, MFU_MIDDLE, MFU_HIGH)
    ]
    price, as_of = _price(spec, gpu)
    usd = [h * price if h is not None and price is not None else None for h in hours]
    plan = CostPlan(
        price_usd_per_hour=price,
        price_as_of=as_of,
        predicted_hours=hours[1],
        predicted_hours_low=hours[2],
        predicted_hours_high=hours[0],
        predicted_usd=usd[1],
        predicted_usd_low=usd[2],
        predicted_usd_high=usd[0],
        reason=_reason(gpu, peak, spec.world_size),
    )
    for value, budget, key in (
        (plan.predicted_hours, spec.max_hours, "max_hours"),
        (plan.predicted_usd, spec.max_usd, "max_usd"),
    ):
        if budget is not None and value is None:
            raise ConfigError(
                f"training.{key} is set and nothing can be held against it:"
                f" {_lacks(peak, price)}; give what is missing, or set {key} to null"
            )
        if value is not None and budget is not None and value > budget:
            raise ConfigError(
                f"training.{key} is {budget:g} and the plan needs {value:.2f}; raise it, or train"
                " fewer tokens"
            )
    return plan


def _price(spec: PlanSpec, gpu: GpuFacts | None) -> tuple[float | None, str | None]:
    """Take the machine's price of the configuration, else the user's row for this card.

    A row's price is that of one card; the result is that of all cards of the run.
    """
    if spec.price_usd_per_hour is not None:
        return spec.price_usd_per_hour, spec.price_as_of
    row = spec.prices.get(gpu.name) if gpu else None
    return (row["usd_per_hour"] * spec.world_size, row["as_of"]) if row else (None, None)


def _lacks(peak: float | None, price: float | None) -> str:
    if peak is None:
        return "the speed of this hardware is not known"
    return "no price is configured for it" if price is None else "the plan has no hours"


def _reason(gpu: GpuFacts | None, peak: float | None, n_cards: int) -> str:
    if gpu is None:
        return "no estimate on a CPU: its peak is not known"
    if peak is None:
        return f"no estimate: the bf16 peak of {gpu.name} is not known"
    shared = f"; {n_cards} cards, taken to share the work perfectly" if n_cards > 1 else ""
    return (
        f"prior: {MFU_LOW:.0%} to {MFU_HIGH:.0%} of {gpu.name}'s dense bf16 peak, uncalibrated;"
        f" start-up, saves and evaluation not included{shared}"
    )
