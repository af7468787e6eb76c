"""What is known of a card: its peaks, from the project's table, read without a YAML library."""

import re
from pathlib import Path
from typing import Any

from expertflow.hardware.records import GpuFacts

TABLE = Path(__file__).resolve().parents[2] / "config" / "hardware" / "gpus.yaml"
# One entry of a row: a list, a quoted text, or what reaches to the next comma.
ENTRY = re.compile(r'(\w+): (\[[^\]]*\]|"[^"]*"|[^,}]*)')
TERA, GIGA = 10**12, 10**9


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read the rows ``- {key: value, ...}`` of the table; nothing else of YAML is understood."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line.strip() for line in lines if line.strip().startswith("- {")]
    return [{key: _value(text) for key, text in ENTRY.findall(row)} for row in rows]


def _value(text: str) -> Any:
    if text.startswith("["):
        return text[1:-1].split(", ")
    if text.startswith('"'):
        return text[1:-1]
    if text == "null":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def card(name: str, memory_bytes: int, *, peak_tflops: float | None) -> GpuFacts:
    """Look a card up by the name that the driver gives; an unknown one has no peaks.

    ``peak_tflops``, where it is given, is taken for the table's bf16 figure.
    """
    rows = [row for row in read_table(TABLE) if name in row["driver_names"]]
    row: dict[str, Any] = (
        rows[0] if rows else {"source": "not in config/hardware/gpus.yaml: peaks unknown"}
    )
    if peak_tflops is not None:
        row = {**row, "bf16_tflops": peak_tflops, "source": "given on the command line"}
    return GpuFacts(
        name=row.get("name", name),
        memory_total_bytes=memory_bytes,
        compute_capability=None,
        peak_bf16_flops_per_s=_scaled(row.get("bf16_tflops"), TERA),
        peak_fp16_flops_per_s=_scaled(row.get("fp16_tflops"), TERA),
        peak_tf32_flops_per_s=_scaled(row.get("tf32_tflops"), TERA),
        peak_bandwidth_bytes_per_s=_scaled(row.get("bandwidth_gb_per_s"), GIGA),
        power_limit_w=row.get("power_w"),
        source=row["source"],
    )


def _scaled(value: float | None, factor: int) -> float | None:
    return None if value is None else value * factor
