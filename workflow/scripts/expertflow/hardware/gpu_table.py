"""The table of cards: exact names, dense peaks, a source for every figure.

Needs no driver, so that plans can be made for cards that are elsewhere.
"""

from typing import Any

from expertflow.hardware.records import GpuFacts

GB, TERA = 10**9, 10**12
# Key of a row: field of a card, and what one of the row's units is in ours.
FIGURES = {
    "memory_gb": ("memory_total_bytes", GB),
    "bf16_tflops": ("peak_bf16_flops_per_s", TERA),
    "fp16_tflops": ("peak_fp16_flops_per_s", TERA),
    "tf32_tflops": ("peak_tf32_flops_per_s", TERA),
    "bandwidth_gb_per_s": ("peak_bandwidth_bytes_per_s", GB),
    "power_w": ("power_limit_w", 1),
}
CAPABILITY = "compute_capability"
NOT_LISTED = "not in config/hardware/gpus.yaml: peaks unknown"
BY_DRIVER = "the driver of this machine"


def find_row(name: str, table: list[dict[str, Any]]) -> dict[str, Any] | None:
    for row in table:
        if name == row["name"] or name in row.get("driver_names", []):
            return row
    return None


def gpu_by_name(name: str, table: list[dict[str, Any]]) -> GpuFacts | None:
    """Look a card up by its short name or by the driver's; no guessing, null when unknown."""
    row = find_row(name, table)
    return None if row is None else facts(row)


def facts(row: dict[str, Any]) -> GpuFacts:
    """Turn a row into a card. A row without ``sources`` has its one source for every figure."""
    figures: dict[str, Any] = {
        field: None if row.get(key) is None else float(row[key]) * factor
        for key, (field, factor) in FIGURES.items()
    }
    if figures["memory_total_bytes"] is not None:
        figures["memory_total_bytes"] = int(figures["memory_total_bytes"])
    figures[CAPABILITY] = row.get(CAPABILITY)
    given = row.get("sources", {})
    keys = {field: key for key, (field, _) in FIGURES.items()} | {CAPABILITY: CAPABILITY}
    return GpuFacts(
        name=row["name"],
        source=row["source"],
        sources={
            field: given.get(keys[field], row["source"])
            for field, value in figures.items()
            if value is not None
        },
        driver_names=tuple(row.get("driver_names", ())),
        **figures,
    )


def unlisted(name: str, **told: Any) -> GpuFacts:
    """Describe a card that the table does not have by what its driver says: no peaks."""
    fields = (*(field for field, _ in FIGURES.values()), CAPABILITY)
    figures: dict[str, Any] = {**dict.fromkeys(fields), **told}
    return GpuFacts(
        name=name,
        source=NOT_LISTED,
        sources={key: BY_DRIVER for key, value in told.items() if value is not None},
        **figures,
    )
