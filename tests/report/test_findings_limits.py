"""Rules that speak beyond one figure: at, below and above it."""

from typing import Any

import pytest
from report_reading import findings_by_code, set_at

Report = dict[str, Any]
HARDWARE = "training_report.hardware"
TENSOR, SM = "tensor_active_percent", "sm_active_percent"
KERNEL, POWER = "any_kernel_percent", "power_w"
KINDS = "evaluation.after.n_by_kind"
STEPS, WALL_S = "training_report.training.steps", "time.wall_s"
TOTAL, WARM_UP = "training_parameters.total_steps", "training_parameters.warmup_steps"
# By code: what is set, and whether the rule speaks, or with which severity.
LIMITS: dict[str, list[tuple[Report, bool | str]]] = {
    "memory-bound-kernels": [
        ({TENSOR: 24.9, SM: 80.1}, True),
        ({TENSOR: 25.0, SM: 80.1}, False),
        ({TENSOR: 24.9, SM: 80.0}, False),
        ({TENSOR: None, SM: 90.0}, False),
        ({TENSOR: 10.0, SM: None}, False),
        ({TENSOR: 5.0, f"{HARDWARE}.samples": 19}, False),
        ({TENSOR: 5.0, f"{HARDWARE}.samples": 20}, True),
    ],
    "small-kernels": [
        ({KERNEL: 90.1, POWER: 419.0, SM: None}, True),
        ({KERNEL: 90.0, POWER: 419.0, SM: None}, False),
        ({KERNEL: 90.1, POWER: 420.0, SM: None}, False),
        # Busy multiprocessors: the kernels are not small.
        ({KERNEL: 90.1, POWER: 419.0, SM: 81.0}, False),
        ({KERNEL: 90.1, POWER: 419.0, SM: 80.0}, True),
        ({KERNEL: None, POWER: 419.0, SM: None}, False),
    ],
    "idle-card": [
        ({KERNEL: 59.9}, True),
        ({KERNEL: 60.0}, False),
        ({KERNEL: 60.1}, False),
        ({KERNEL: 5.0, f"{HARDWARE}.samples": 19}, False),
        ({KERNEL: 5.0, f"{HARDWARE}.samples": 20}, True),
    ],
    "thermal-throttling": [  # of 2,680 s
        ({f"{HARDWARE}.throttle_s": {"power": 2_000.0, "thermal": hot_s}}, speaks)
        for hot_s, speaks in ((26.7, False), (26.8, False), (26.9, True))
    ],
    "memory-spilled": [  # of 80 GB
        ({f"{HARDWARE}.memory_spilled_bytes": spilled}, speaks)
        for spilled, speaks in ((0.7e9, False), (0.8e9, False), (0.9e9, True))
    ],
    "memory-room": [  # of 80 GB
        ({"plan.next_micro_batch_peak_bytes": peak}, speaks)
        for peak, speaks in ((73.5e9, True), (73.6e9, False), (73.7e9, False))
    ],
    "monitor-overhead": [
        ({f"{HARDWARE}.monitor_cpu_fraction": share}, speaks)
        for share, speaks in ((None, False), (0.0049, False), (0.005, False), (0.0051, True))
    ],
    "monitor-lost": [({f"{HARDWARE}.samples": 0}, True), ({f"{HARDWARE}.samples": 1}, False)],
    "padding": [
        ({"data.padding_fraction": share}, speaks)
        for share, speaks in ((None, False), (0.0999, False), (0.10, False), (0.1001, True))
    ],
    "few-steps": [
        ({TOTAL: 50, WARM_UP: 9}, False),
        ({TOTAL: 49, WARM_UP: 4}, True),
        ({TOTAL: 900, WARM_UP: 179}, False),
        ({TOTAL: 900, WARM_UP: 180}, True),
        ({TOTAL: 900, WARM_UP: 181}, True),
    ],
    "rows-too-long": [
        ({"data.packing": packing, "data.seq_len": n, "data.length_histogram.max": 1_600}, speaks)
        for packing, n, speaks in (
            ("none", 2_000, False),
            ("none", 2_001, True),
            ("bfd", 4_096, False),
        )
    ],
    "data-wait": [
        ({STEPS: n_steps, WALL_S: wall_s, "time.data_wait_s": wall_s / 2}, speaks)
        for n_steps, wall_s, speaks in (
            (19, 4_000, False),
            (20, 4_000, True),
            (1_800, 59.9, False),
            (1_800, 60, True),
        )
    ],
    "export-moved-loss": [
        ({"export.loss_before_merge": 0.5312, "export.loss_after_merge": after}, speaks)
        for after, speaks in ((0.5312, False), (0.53125, False), (0.5314, True))
    ],
    "answers-cut-off": [
        ({"evaluation.after.n_cut_off": n_cut}, speaks)
        for n_cut, speaks in ((None, False), (10, False), (11, True))
    ],
    "one-kind-of-error": [
        ({KINDS: {"correct": 200 - n - 1, kind: n, "empty": 1}}, speaks)
        for kind, n, speaks in (
            ("syntax_error", 40, False),
            ("syntax_error", 41, True),
            ("wrong_result", 90, False),
        )
    ],
    "questions-shared": [
        ({"evaluation.n_questions_shared_with_training": n}, said)
        for n, said in ((0, False), (3, "info"), (4, "warning"))
    ],
    "questions-not-asked": [
        ({KINDS: {"correct": 100, "wrong_result": 100 - n, "not_asked": n}}, said)
        for n, said in ((0, False), (10, "info"), (11, "warning"))
    ],
}
ADVICE = {
    "memory-room": "batch_size: 32, gradient_accumulation_steps: 1",
    "answers-cut-off": "evaluation.max_new_tokens",
    "questions-not-asked": "shorten the prompts",
}


@pytest.mark.parametrize(
    ("code", "changes", "expected"),
    [(code, *case) for code, cases in LIMITS.items() for case in cases],
)
def test_a_rule_speaks_beyond_its_limit_alone(
    code: str, changes: Report, expected: bool | str, gpu_report: Report
) -> None:
    power = gpu_report["training_report"]["hardware"]["power_w"]
    for path, value in changes.items():
        if path in (TENSOR, SM, KERNEL, POWER):
            stats = None if value is None else {**power, "mean": value, "p50": value}
            set_at(gpu_report, f"{HARDWARE}.{path}", stats)
        else:
            set_at(gpu_report, path, value)
    said = findings_by_code(gpu_report).get(code)
    assert (said is not None) is bool(expected)
    if said:
        assert expected in (True, said.severity)
        assert ADVICE.get(code, "") in said.recommendation
