"""What a machine is, and what was seen of it while something ran."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """A card as a planner sees it. Null where no source gives the figure.

    ``peak_*`` are dense figures, without sparsity; ``source`` says where each row comes from.
    """

    name: str
    memory_total_bytes: int | None
    compute_capability: str | None
    peak_bf16_flops_per_s: float | None
    peak_fp16_flops_per_s: float | None
    peak_tf32_flops_per_s: float | None
    peak_bandwidth_bytes_per_s: float | None
    power_limit_w: float | None
    source: str
    driver_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Spread of a sampled quantity."""

    mean: float
    min: float
    max: float
    p5: float
    p50: float
    p95: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """One reading. ``utilization_percent`` means "some kernel was running", no more."""

    elapsed_s: float
    utilization_percent: float | None
    memory_used_bytes: int | None
    temperature_c: float | None
    power_w: float | None
    energy_j: float | None
    cpu_percent: float | None
    ram_used_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorRecord:
    """A monitored stretch of time. ``unavailable`` maps a null figure to its reason."""

    configured_interval_s: float
    effective_interval_s: float | None
    n_samples: int
    simulated: bool
    gpu_name: str | None
    driver: str | None
    memory_total_bytes: int | None
    power_limit_w: float | None
    energy_j: float | None
    any_kernel_percent: Stats | None
    memory_used_bytes: Stats | None
    temperature_c: Stats | None
    power_w: Stats | None
    cpu_percent: Stats | None
    ram_used_bytes: Stats | None
    assessment: tuple[str, ...]
    unavailable: dict[str, str]
    processes: tuple[dict[str, Any], ...] = ()
