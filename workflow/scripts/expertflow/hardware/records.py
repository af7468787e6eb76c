"""Records of a machine, and of what was measured while something ran on it."""

from typing import TypedDict

from msgspec import field

from expertflow.core.records import Record


class GpuFacts(Record, frozen=True, kw_only=True):
    """A card for a planner; ``peak_*`` are dense, ``sources`` per figure, ``source`` for all."""

    name: str
    memory_total_bytes: int | None = None
    compute_capability: str | None = None
    peak_bf16_flops_per_s: float | None = None
    peak_fp16_flops_per_s: float | None = None
    peak_tf32_flops_per_s: float | None = None
    peak_bandwidth_bytes_per_s: float | None = None
    power_limit_w: float | None = None
    source: str
    driver_names: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)


class Stats(Record, frozen=True, kw_only=True):
    mean: float
    min: float
    max: float
    p50: float
    p95: float


class GpuSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One reading. ``utilization_percent`` means "some kernel was running", no more.

    ``*_active_percent`` cover the time since the previous reading; disk figures the time since the
    last that had them, about 1 s ago. ``starts`` marks the first reading of a session, from which
    differences count. ``*_all_*`` add up all monitored cards. ``lost``: what the driver failed to
    report this time, and why.
    """

    elapsed_s: float
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    cpu_percent: float | None = None
    ram_used_bytes: int | None = None
    tensor_active_percent: float | None = None
    sm_active_percent: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    starts: bool = False
    simulated: bool = False
    energy_all_j: float | None = None
    power_all_w: float | None = None
    lost: dict[str, str] = field(default_factory=dict)


class CardProcess(TypedDict):
    """A process that holds memory of card number ``gpu``."""

    pid: int
    name: str | None
    memory_used_bytes: int | None
    gpu: int


class Card(Record, frozen=True, kw_only=True):
    """The first of the ``n_gpus`` monitored (all visible ones, or as many as a run uses).

    ``processes`` hold memory. ``unavailable`` maps a null figure to its reason.
    """

    gpu_name: str | None = None
    driver: str | None = None
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    temperature_limits_c: dict[str, float] | None = None
    n_gpus: int | None = None
    simulated: bool = False
    processes: tuple[CardProcess, ...] = ()
    unavailable: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


class MonitorRecord(Card, frozen=True, kw_only=True):
    """A monitored period. Statistics are over time; RAM is the whole machine's.

    ``configured_interval_s`` is null if the monitor chose the interval. ``throttle_s`` are seconds
    by cause, ``monitor_cpu_fraction`` is of one core, ``n_lost_readings`` counts failed ones by
    figure. ``*_all_*`` add up the monitored cards. ``wall_s`` excludes pauses.
    """

    configured_interval_s: float | None
    effective_interval_s: float | None
    n_samples: int
    energy_j: float | None
    any_kernel_percent: Stats | None
    memory_used_bytes: Stats | None
    temperature_c: Stats | None
    power_w: Stats | None
    cpu_percent: Stats | None
    ram_used_bytes: Stats | None
    assessment: tuple[str, ...]
    tensor_active_percent: Stats | None = None
    sm_active_percent: Stats | None = None
    sm_clock_mhz: Stats | None = None
    memory_clock_mhz: Stats | None = None
    pcie_rx_bytes_per_s: Stats | None = None
    pcie_tx_bytes_per_s: Stats | None = None
    throttle_s: dict[str, float] | None = None
    energy_source: str | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    monitor_cpu_fraction: float | None = None
    wall_s: float | None = None
    energy_all_j: float | None = None
    power_all_w: Stats | None = None
    n_lost_readings: dict[str, int] = field(default_factory=dict)
