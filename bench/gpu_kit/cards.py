"""A card's peaks, from the project's table."""

from pathlib import Path

import yaml
from msgspec.structs import replace

from expertflow.hardware.gpu_table import describe_unlisted, gpu_by_name
from expertflow.hardware.records import GpuFacts

TABLE = Path(__file__).resolve().parents[2] / "config" / "hardware" / "gpus.yaml"


def card(name: str, memory_bytes: int, *, peak_tflops: float | None) -> GpuFacts:
    """Look up a card by the driver's name; an unknown one has no peaks.

    ``peak_tflops``, if given, replaces the table's bf16 figure.
    """
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))["gpus"]
    facts = gpu_by_name(name, table) or describe_unlisted(name)
    facts = replace(facts, memory_total_bytes=memory_bytes)
    if peak_tflops is None:
        return facts
    given = "given on the command line"
    return replace(facts, peak_bf16_flops_per_s=peak_tflops * 1e12, source=given)
