from types import SimpleNamespace

import torch
from pytest import MonkeyPatch

from expertflow.train import device


def test_the_rate_is_that_of_the_median_product(monkeypatch: MonkeyPatch) -> None:
    n_runs = device.N_WARMUP + device.N_TIMED
    slow = [0.5] * device.N_WARMUP + [0.002] * (device.N_TIMED - 1) + [9.0]
    ticks = iter([t for i in range(n_runs) for t in (10.0 * i, 10.0 * i + slow[i])])
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(device, "CPU_WIDTH", 64)
    rate = device.measured_matmul_flops_per_s(torch.device("cpu"), torch.float32)
    assert abs(rate / (2 * 64**3 / 0.002) - 1) < 1e-6


def test_it_runs_in_half_precision_on_a_cpu() -> None:
    rate = device.measured_matmul_flops_per_s(torch.device("cpu"), torch.bfloat16)
    assert 1e6 < rate < 1e15
