"""Series of a made-up run: steps, hardware samples, and their summary."""

import math
import random
from typing import Any

from expertflow.hardware import records as h
from expertflow.train.records import Kernel, KernelProfile, StepRecord

GPU = "NVIDIA H100 80GB HBM3"
N_STEPS, STEP_S, EVAL_EVERY, TOKENS_PER_STEP = 1800, 1.38, 300, 48_000
NO_CARD = dict.fromkeys(
    ("utilization_percent", "memory_used_bytes", "temperature_c", "power_w", "energy_j")
)

KERNELS = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT": 41_000.0,
    "void cutlass::device_kernel<flash::FlashAttnBwdSm90<(int)128, A & B>>(Params)": 22_000.0,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>": 9_000.0,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": 7_500.0,
    "Memcpy DtoD (Device -> Device)": 1_200.0,
    **{f"triton_poi_fused_mul_silu_{i}": 100.0 + i for i in range(20)},
}


def make_steps() -> tuple[StepRecord, ...]:
    """Make steps with a falling, noisy loss and a pause after each evaluation."""
    chance = random.Random(1)
    elapsed_s, steps = 30.0, []
    for step in range(1, N_STEPS + 1):
        took_s = STEP_S * chance.uniform(0.97, 1.04)
        elapsed_s += took_s
        loss = 0.53 + 1.57 * math.exp(-7.2 * step / N_STEPS) + chance.gauss(0, 0.02)
        steps.append(
            StepRecord(
                step=step, epoch=2 * step / N_STEPS, loss=loss, learning_rate=2e-4,
                grad_norm=chance.uniform(0.4, 1.1), n_tokens=TOKENS_PER_STEP,
                n_target_tokens=TOKENS_PER_STEP // 3,
                step_s=took_s, data_wait_s=0.012, elapsed_s=elapsed_s, h2d_s=None, forward_s=None,
                backward_s=None, optimizer_s=None,
            )
        )  # fmt: skip
        if step % EVAL_EVERY == 0:
            elapsed_s += 20.0
    return tuple(steps)


def _stats(mean: float, spread: float) -> h.Stats:
    return h.Stats(
        mean=mean, min=mean - 2 * spread, max=mean + spread, p50=mean,
        p95=mean + spread / 2,
    )  # fmt: skip


def make_monitor() -> h.MonitorRecord:
    return h.MonitorRecord(
        configured_interval_s=1.0, effective_interval_s=1.01, n_samples=2_680, simulated=True,
        gpu_name=GPU, driver="580.65", memory_total_bytes=80_000_000_000, power_limit_w=700.0,
        energy_j=1.47e6, any_kernel_percent=_stats(93.0, 6.0),
        memory_used_bytes=_stats(62.2e9, 0.1e9), temperature_c=_stats(67.0, 2.0),
        power_w=_stats(612.0, 40.0), cpu_percent=_stats(14.0, 3.0),
        ram_used_bytes=_stats(31e9, 1e9), assessment=("the card was busy",), unavailable={},
        tensor_active_percent=_stats(38.0, 4.0), sm_active_percent=_stats(86.0, 5.0),
        sm_clock_mhz=_stats(1_905.0, 30.0), memory_clock_mhz=_stats(2_619.0, 0.0),
        pcie_rx_bytes_per_s=_stats(2.1e6, 0.4e6), pcie_tx_bytes_per_s=_stats(0.9e6, 0.2e6),
        throttle_s={"power": 41.0, "thermal": 3.0},
        n_gpus=1, energy_all_j=1.47e6, power_all_w=_stats(612.0, 40.0),
        temperature_limits_c={"slowdown": 87.0, "shutdown": 92.0, "max_operating": 83.0},
        energy_source="counter", disk_read_bytes=410_000_000, disk_write_bytes=390_000_000,
        monitor_cpu_fraction=0.0021, wall_s=2_680.0,
    )  # fmt: skip


def make_machine() -> dict[str, Any]:
    """Describe the rented machine as in its preflight."""
    card = {
        "index": 0, "name": GPU, "listed_as": "H100 SXM", "memory_total_bytes": 80_000_000_000,
        "memory_free_bytes": 79_400_000_000, "compute_capability": "9.0", "supports_bf16": True,
        "supports_tf32": True, "power_limit_w": 700.0, "unavailable": {},
    }  # fmt: skip
    disk = {
        "path": "/scratch", "asked_by": "config", "file_system": "ext4",
        "free_bytes": 900_000_000_000,
        "read_bytes_per_s": 2.9e9, "read_method": "256 MiB, past the page cache",
    }  # fmt: skip
    return {
        "cpu_model": "Intel Xeon Platinum 8480+", "n_cpus_physical": 56, "n_cpus_logical": 112,
        "n_cpus_affinity": 112, "cpu_quota_cpus": 8.0, "n_cpus_usable": 8,
        "ram_total_bytes": 1_080_000_000_000, "ram_limit_bytes": 240_000_000_000,
        "ram_usable_bytes": 240_000_000_000, "driver": "580.65", "gpus": [card],
        "scratch": [disk], "simulated": True, "unavailable": {}, "remarks": [],
    }  # fmt: skip


def make_gpu_samples() -> tuple[h.GpuSample, ...]:
    chance = random.Random(3)
    samples = []
    for second in range(0, 2_680, 2):
        pause = second < 31 or 0 <= (second - 30) % 437 - 417 < 18
        samples.append(
            h.GpuSample(
                elapsed_s=float(second),
                utilization_percent=12.0 if pause else chance.uniform(94, 97),
                memory_used_bytes=0 if second < 20 else 62_200_000_000,
                temperature_c=62 + 6 * (1 - math.exp(-second / 240)) - (3 if pause else 0),
                power_w=180.0 if pause else chance.gauss(612, 12),
                energy_j=548.0 * second,
                cpu_percent=chance.uniform(10, 18),
                ram_used_bytes=31_000_000_000,
                tensor_active_percent=2.0 if pause else chance.gauss(38, 1),
                sm_active_percent=9.0 if pause else chance.gauss(86, 1.5),
                sm_clock_mhz=1_905,
                memory_clock_mhz=2_619,
                pcie_rx_bytes_per_s=2.1e6,
                pcie_tx_bytes_per_s=0.9e6,
                throttle_reasons=("sw_power_cap",) if 300 <= second < 341 else (),
                disk_read_bytes=300_000,
                disk_write_bytes=290_000,
            )
        )
    return tuple(samples)


def make_cpu_samples() -> tuple[h.GpuSample, ...]:
    chance = random.Random(4)
    return tuple(
        h.GpuSample(
            elapsed_s=float(second),
            **NO_CARD,
            cpu_percent=chance.uniform(88, 97) if second > 6 else 40.0,
            ram_used_bytes=3_100_000_000 + 2_000_000 * min(second, 40),
        )
        for second in range(0, 2_680, 2)
    )


def make_profile() -> KernelProfile:
    kernels = [Kernel(name=name, n_calls=5, total_s=5 * us / 1e6) for name, us in KERNELS.items()]
    return KernelProfile(
        n_steps=5, first_step=12, device="cuda", pause_s=3.4,
        wall_s=sum(kernel.total_s for kernel in kernels) / 0.9,
        kernels=tuple(sorted(kernels, key=lambda kernel: (-kernel.total_s, kernel.name))),
        trace="trace.json.gz", n_trace_bytes=11_000_000,
    )  # fmt: skip
