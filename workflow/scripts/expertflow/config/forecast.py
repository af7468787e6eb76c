"""Say what a training should take before it runs: hours, dollars, and how that is known.

A dry run shows it, so it is read off the disk in milliseconds, from the best there is: the plan,
else packed tokens, else the bytes of the sources. Each step down widens the band. What cannot be
known is unknown, with its reason.
"""

import json
import math
from pathlib import Path

from expertflow.config.expected_work import Case, Range, Unknown, expected_flops
from expertflow.core.errors import ExpertflowError, HardwareError
from expertflow.core.files import sha256_file, sha256_text
from expertflow.core.records import Record, read_part
from expertflow.hardware.gpu_table import gpu_by_name
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost import MFU_HIGH, MFU_LOW, peak_flops_per_s, planned_price
from expertflow.plan.records import CostPlan, PlanSpec
from expertflow.plan.switches import choose_precision


class Forecast(Record, frozen=True, kw_only=True):
    """What a training should take, least and most; null where unknown. ``basis`` tells why."""

    hours: Range | None
    usd: Range | None
    hardware: str
    basis: str

    def text(self) -> str:
        """Write it as the one line that Snakemake carries to its logger.

        >>> Forecast(hours=(0.5, 1.25), usd=None, hardware="L4", basis="plan").text()
        '0.50 to 1.2 hours; unknown dollars; L4; plan'
        """
        hours, usd = _range(self.hours), _range(self.usd)
        return f"{hours} hours; {usd} dollars; {self.hardware}; {self.basis}"


def is_current(record: Path, *, spec: str, code: str) -> bool:
    """Tell by its sidecar whether a record is whole and was made from a spec by a code."""
    sidecar = record.with_name(f".{record.name}.fingerprint")
    if not record.is_file() or not sidecar.is_file():
        return False
    try:
        made = json.loads(sidecar.read_text(encoding="utf-8"))
    except ValueError:
        return False
    wanted = {"spec_sha256": sha256_text(spec), "code": code, "sha256": sha256_file(record)}
    return all(made.get(key) == value for key, value in wanted.items())


def forecast(case: Case) -> Forecast:
    """Give what the training of an expert should take; a record that cannot be read ends no run."""
    try:
        return _forecast(case)
    except ExpertflowError as error:
        name, reason = case.spec.hardware, _first_clause(error)
        return Forecast(hours=None, usd=None, hardware=name, basis=reason)


def _first_clause(error: ExpertflowError) -> str:
    """Give what is the matter, in one line, without the mend."""
    return " ".join(str(error).split("; ")[0].split())


def _forecast(case: Case) -> Forecast:
    plan = case.results / "plan.json"
    if case.is_current("plan_training", plan):
        return _planned(plan)
    note = "; plan.json is of other settings or code" if plan.is_file() else ""
    hardware = case.spec.hardware
    try:
        gpu = _gpu(case.spec)
        hardware = f"{case.spec.world_size} x {gpu.name}"
        speed = _speed(case.spec, gpu)
        flops, basis = expected_flops(case)
    except Unknown as reason:
        return Forecast(hours=None, usd=None, hardware=hardware, basis=f"{reason}{note}")
    hours = flops[0] / (speed * MFU_HIGH) / 3600, flops[1] / (speed * MFU_LOW) / 3600
    price = planned_price(case.spec, gpu)
    return Forecast(
        hours=hours,
        usd=_usd(price.usd(hours[0]), price.usd(hours[1])),
        hardware=hardware,
        basis=f"{basis}; {_price_text(price.usd_per_hour, price.as_of, gpu.name)}{note}",
    )


def _planned(path: Path) -> Forecast:
    cost: CostPlan = read_part(CostPlan, path, "cost")
    name: str = read_part(str, path, "hardware")
    basis = "calibrated plan" if cost.calibrated else "plan"
    if cost.predicted_hours_low is None or cost.predicted_hours_high is None:
        return Forecast(hours=None, usd=None, hardware=name, basis=f"{basis}: {cost.reason}")
    n_cards = read_part(int, path, "world_size")
    return Forecast(
        hours=(cost.predicted_hours_low, cost.predicted_hours_high),
        usd=_usd(cost.predicted_usd_low, cost.predicted_usd_high),
        hardware=name if name == "cpu" else f"{n_cards} x {name}",
        basis=f"{basis}; {_price_text(cost.price_usd_per_hour, cost.price_as_of, name)}",
    )


def _gpu(spec: PlanSpec) -> GpuFacts:
    if spec.hardware == "cpu":
        raise Unknown("the speed of a CPU is not known before a calibrated plan")
    table = list(spec.gpu_table)
    gpu = gpu_by_name(spec.hardware, table)
    if gpu is None:
        # Imported here: only ``auto`` is worth bringing the driver's library along.
        from expertflow.hardware.probe import resolve_gpu

        try:
            gpu = resolve_gpu(spec.hardware, table)
        except HardwareError as error:
            raise Unknown(_first_clause(error)) from error
    assert gpu is not None
    return gpu


def _speed(spec: PlanSpec, gpu: GpuFacts) -> float:
    """Give the dense peak of all cards together, at the precision that the plan will choose."""
    precision, _ = choose_precision(spec, gpu)
    peak = peak_flops_per_s(gpu, precision, use_tf32=spec.use_tf32)
    if peak is None:
        raise Unknown(f"no {precision} peak is known for {gpu.name}")
    return peak * spec.world_size


def _price_text(usd_per_hour: float | None, as_of: str | None, gpu: str) -> str:
    if usd_per_hour is None:
        is_card = gpu != "cpu"
        return f"no price for {gpu} in config/hardware/prices.yaml" if is_card else "no price set"
    return f"${usd_per_hour:.2f}/h" + (f" of {as_of}" if as_of else ", undated")


def _usd(low: float | None, high: float | None) -> Range | None:
    return None if low is None or high is None else (low, high)


def _range(values: Range | None) -> str:
    return "unknown" if values is None else f"{_number(values[0])} to {_number(values[1])}"


def _number(value: float) -> str:
    """Write two significant digits, without an exponent; the bands are wider than that."""
    n_decimals = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{n_decimals}f}"
