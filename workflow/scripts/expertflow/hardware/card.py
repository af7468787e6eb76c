"""What does not change about the cards while they are watched."""

from typing import Any

from msgspec import field
from msgspec.structs import fields, replace

from expertflow.core.records import Record
from expertflow.hardware.nvml import Gpus
from expertflow.hardware.records import MonitorRecord

# What a record says of a card; null without one.
GPU_FIGURES = (
    *("gpu_name", "driver", "memory_total_bytes", "power_limit_w", "any_kernel_percent"),
    *("memory_used_bytes", "temperature_c", "power_w", "energy_j", "tensor_active_percent"),
    *("sm_active_percent", "sm_clock_mhz", "memory_clock_mhz", "pcie_rx_bytes_per_s"),
    *("pcie_tx_bytes_per_s", "throttle_s", "temperature_limits_c", "energy_source"),
    *("throttle_source", "energy_all_j", "power_all_w", "n_gpus"),
)
# What is asked under another name than the record's.
OTHERWISE = {
    "processes.compute": ("processes",),
    "throttle_reasons": ("throttle_s", "throttle_source"),
    "energy_j": ("energy_source", "energy_all_j"),
    "power_w": ("power_all_w",),
}
_RECORD = {f.name for f in fields(MonitorRecord)}


class Card(Record, frozen=True, kw_only=True):
    """The first visible card, and how many there are; ``unavailable`` says why a figure is null."""

    gpu_name: str | None = None
    driver: str | None = None
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    temperature_limits_c: dict[str, float] | None = None
    n_gpus: int | None = None
    simulated: bool = False
    processes: tuple[dict[str, Any], ...] = ()
    unavailable: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def no_card(reason: str) -> Card:
    """Give what is known where no card can be asked."""
    return Card(unavailable=dict.fromkeys(GPU_FIGURES, reason))


def describe(gpus: Gpus) -> Card:
    """Ask the cards for what does not change."""
    if not gpus.devices:
        return no_card(gpus.reason or "no GPU")
    first = gpus.devices[0]
    known: dict[str, Any] = {
        "gpu_name": first.name(),
        "memory_total_bytes": first.memory_total_bytes(),
        "power_limit_w": first.power_limit_w(),
        "temperature_limits_c": first.temperature_limits_c(),
    }
    missing = {
        name: first.unavailable.get(name) or first.lost.get(name) or "the driver gave none"
        for name, value in known.items()
        if value is None
    }
    return Card(
        **known,
        driver=gpus.driver,
        n_gpus=len(gpus.devices),
        simulated=gpus.simulated,
        unavailable=missing,
        remarks=gpus.remarks,
    )


def at_the_end(card: Card, gpus: Gpus) -> Card:
    """Add what the cards turned out not to tell, and who holds their memory."""
    if not gpus.devices:
        return card
    processes = tuple(p for device in gpus.devices for p in device.processes())
    told = gpus.devices[0].unavailable
    reasons = {name: reason for name, reason in told.items() if name in _RECORD}
    for what, names in OTHERWISE.items():
        if what in told:
            reasons |= dict.fromkeys(names, told[what])
    return replace(card, processes=processes, unavailable={**reasons, **card.unavailable})


def from_record(record: MonitorRecord) -> Card:
    """Take what an earlier record says of the card that a trace is of."""
    names = {f.name for f in fields(Card)} - {"processes", "remarks"}
    return Card(**{name: getattr(record, name) for name in names})
