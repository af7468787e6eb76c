"""The table of cards: exact names, dense peaks, a source for every figure; needs no driver."""

from collections.abc import Callable, Sequence
from typing import Any

from expertflow.hardware.records import GpuFacts

CardRow = dict[str, Any]
GB, TERA = 1e9, 1e12
# Key of a row: field of a card, and the conversion to our units.
FIGURES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "memory_gb": ("memory_total_bytes", lambda value: int(value * GB)),
    "bf16_tflops": ("peak_bf16_flops_per_s", lambda value: value * TERA),
    "fp16_tflops": ("peak_fp16_flops_per_s", lambda value: value * TERA),
    "tf32_tflops": ("peak_tf32_flops_per_s", lambda value: value * TERA),
    "bandwidth_gb_per_s": ("peak_bandwidth_bytes_per_s", lambda value: value * GB),
    "power_w": ("power_limit_w", float),
    "compute_capability": ("compute_capability", str),
}
NOT_LISTED = "not in config/hardware/gpus.yaml: peaks unknown"
BY_DRIVER = "this machine's driver"
# Lowest compute capability with bf16, TF32 and torch's variable-length attention kernel.
AMPERE = 8.0


def find_row(name: str, table: Sequence[CardRow]) -> CardRow | None:
    return next((r for r in table if name in (r["name"], *r.get("driver_names", ()))), None)


def gpu_by_name(name: str, table: Sequence[CardRow]) -> GpuFacts | None:
    row = find_row(name, table)
    return None if row is None else gpu_from_row(row)


def is_ampere(gpu: GpuFacts) -> bool:
    """Return whether a card is Ampere or newer; only an own row may lack the capability."""
    if gpu.compute_capability is None:
        return gpu.peak_bf16_flops_per_s is not None or gpu.peak_fp16_flops_per_s is None
    return float(gpu.compute_capability) >= AMPERE


def gpu_from_row(row: CardRow) -> GpuFacts:
    """Turn a row into a card. A row without ``sources`` has one source for all figures."""
    known = [key for key in FIGURES if row.get(key) is not None]
    given = row.get("sources", {})
    figures: dict[str, Any] = {FIGURES[key][0]: FIGURES[key][1](row[key]) for key in known}
    return GpuFacts(
        name=row["name"],
        source=row["source"],
        sources={FIGURES[key][0]: given.get(key, row["source"]) for key in known},
        driver_names=tuple(row.get("driver_names", ())),
        **figures,
    )


def describe_unlisted(name: str, **figures: Any) -> GpuFacts:
    sources = {key: BY_DRIVER for key, value in figures.items() if value is not None}
    return GpuFacts(name=name, source=NOT_LISTED, sources=sources, **figures)
