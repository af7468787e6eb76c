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
    """One reading. ``utilization_percent`` means "some kernel was running", no more.

    ``tensor_active_percent`` and ``sm_active_percent`` are the card's own counters (GPM) over the
    time since the reading before. ``throttle_reasons`` names what held the clocks back just then.
    Disk figures are this machine's counters since the reading before.
    """

    elapsed_s: float
    utilization_percent: float | None
    memory_used_bytes: int | None
    temperature_c: float | None
    power_w: float | None
    energy_j: float | None
    cpu_percent: float | None
    ram_used_bytes: int | None
    tensor_active_percent: float | None = None
    sm_active_percent: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorRecord:
    """A monitored stretch of time. ``unavailable`` maps a null figure to its reason.

    ``configured_interval_s`` is null where the monitor chose its own. ``temperature_limits_c`` are
    the device's (``slowdown``, ``shutdown``, ``max_operating``), ``throttle_s`` the seconds by
    cause, ``monitor_cpu_fraction`` what the monitor itself took of one core.
    """

    configured_interval_s: float | None
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
    tensor_active_percent: Stats | None = None
    sm_active_percent: Stats | None = None
    sm_clock_mhz: Stats | None = None
    memory_clock_mhz: Stats | None = None
    pcie_rx_bytes_per_s: Stats | None = None
    pcie_tx_bytes_per_s: Stats | None = None
    throttle_s: dict[str, float] | None = None
    temperature_limits_c: dict[str, float] | None = None
    energy_source: str | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    monitor_cpu_fraction: float | None = None
    wall_s: float | None = None
