"""Findings on run, card and data at, below and above their limits; bars; the bottleneck."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_reading import findings_by_code, set_at

from expertflow.core.errors import ConfigError
from expertflow.report.build import build_report
from expertflow.report.diagnose import accept, bottleneck, find
from expertflow.report.findings.evidence import time_shares
from expertflow.report.inputs import ReportInputs
from expertflow.report.records import AcceptanceRule

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


def _row(report: Report, quantity: str) -> Report:
    return next(row for row in report["plan_against_actual"] if row["quantity"] == quantity)


def _took(report: Report, hours: float) -> Report:
    _row(report, "Wall time")["actual"] = hours
    return report


@pytest.mark.parametrize(
    ("hours", "speaks"),
    [(0.709, True), (0.71, False), (0.75, False), (0.77, False), (0.771, True)],
)
def test_plan_missed(hours: float, speaks: bool, gpu_report: Report) -> None:
    assert ("plan-missed" in findings_by_code(_took(gpu_report, hours))) is speaks


def test_missed_prior_weighs_less_than_a_missed_calibration(gpu_report: Report) -> None:
    assert findings_by_code(_took(gpu_report, 2.0))["plan-missed"].severity == "warning"
    gpu_report["plan"]["calibrated"] = False
    assert findings_by_code(gpu_report)["plan-missed"].severity == "info"


@pytest.mark.parametrize(
    ("held", "speaks"), [(62.9e9, False), (63e9, False), (63.1e9, True), (None, False)]
)
def test_more_memory_than_planned(held: float | None, speaks: bool, gpu_report: Report) -> None:
    row = _row(gpu_report, "Peak device memory")
    difference = None if held is None else held / row["plan"] - 1
    row |= {"actual": held, "difference_fraction": difference}
    assert ("memory-over-plan" in findings_by_code(gpu_report)) is speaks


def test_only_claims_that_fail_are_repeated(gpu_report: Report) -> None:
    claims = [finding for finding in find(gpu_report) if finding.code == "claim"]
    assert len(claims) == 1
    assert "47 hours" in claims[0].evidence and "minutes" in claims[0].evidence


def test_fallbacks_are_said(gpu_report: Report) -> None:
    assert findings_by_code(gpu_report)["tokenizer-fallback"].severity == "info"
    assert not {"measured-peak", "memory-short"} & set(findings_by_code(gpu_report))
    gpu_report["data"]["tokenizer_fallbacks"] = []
    gpu = gpu_report["training_report"]["hardware"]["gpu"]
    gpu["peak_source"] = "measured matmul on this card"
    retry = {"micro_batch_size": 8, "n_accumulation_steps": 9}
    gpu_report["training_report"]["training"]["memory_retries"] = [retry]
    gpu_report["training_parameters"] |= {"batch_size": 8, "gradient_accumulation_steps": 4}
    found = findings_by_code(gpu_report)
    assert "tokenizer-fallback" not in found
    assert found["measured-peak"].severity == "info"
    advice = found["memory-short"].recommendation
    assert "batch_size to 8 and gradient_accumulation_steps to 4" in advice


def test_epochs_of_another_length_are_not_compared(gpu_report: Report) -> None:
    assert "rows-not-compared" not in findings_by_code(gpu_report)
    gpu_report["training_report"]["training"]["epochs"] = 3.0
    assert "2 of the packed rows" in findings_by_code(gpu_report)["rows-not-compared"].evidence


def test_what_could_not_be_staged_isfindings_by_code(gpu_report: Report) -> None:
    assert "not-staged" not in findings_by_code(gpu_report)
    used = gpu_report["staging"]["used"]
    used["weights"] |= {"is_fallback": True, "reason": "/scratch: No space left on device"}
    said = findings_by_code(gpu_report)["not-staged"]
    assert said.evidence == "weights were read where they are: /scratch: No space left on device"
    assert said.severity == "warning"


LIMITS_time = [
    ("data-wait", "data_wait_s", 0.05),
    ("checkpoint-time", "checkpoint_s", 0.02),
    ("evaluation-time", "eval_s", 0.05),
    ("start-up", "startup_s", 0.10),
    ("lost-work", "other_s", 0.05),  # the run had two sessions
]


def _unbroken(report: Report) -> Report:
    report["training_report"]["training"] |= {"sessions": 1, "memory_retries": []}
    return report


def _with_share(report: Report, part: str, share: float) -> Report:
    report["time"] |= {"wall_s": 4_000.0, "other_s": 0.0, part: share * 4_000}
    report["profile"] = None
    return report


@pytest.mark.parametrize(("code", "part", "limit"), LIMITS_time)
@pytest.mark.parametrize(("above", "speaks"), [(-0.001, False), (0.0, False), (0.001, True)])
def test_lost_time(
    code: str, part: str, limit: float, above: float, speaks: bool, gpu_report: Report
) -> None:
    found = findings_by_code(_with_share(gpu_report, part, limit + above))
    assert (code in found) is speaks
    if speaks:
        assert found[code].worth_usd == pytest.approx(2.49 * (limit + above) * 4_000 / 3_600)


def test_start_up_counts_the_tail(gpu_report: Report) -> None:
    _with_share(_unbroken(gpu_report), "startup_s", 0.06)
    assert "start-up" not in findings_by_code(gpu_report)
    gpu_report["time"]["other_s"] = 0.05 * 4_000
    assert "start-up" in findings_by_code(gpu_report)


@pytest.mark.parametrize(
    "how", [{"sessions": 2}, {"memory_retries": [{"micro_batch_size": 1}]}], ids=["kill", "memory"]
)
def test_work_that_was_thrown_away_is_no_start_up(how: Report, gpu_report: Report) -> None:
    _with_share(_unbroken(gpu_report), "other_s", 0.2)
    found = findings_by_code(gpu_report)
    assert "start-up" in found and "lost-work" not in found
    gpu_report["training_report"]["training"] |= how
    found = findings_by_code(gpu_report)
    assert "start-up" not in found
    assert "save more often" in found["lost-work"].recommendation


def test_no_price_no_worth_but_a_reason(gpu_report: Report) -> None:
    gpu_report["cost"]["usd_per_hour"] = None
    finding = findings_by_code(_with_share(gpu_report, "data_wait_s", 0.2))["data-wait"]
    assert finding.worth_usd is None and "price" in (finding.worth_reason or "")


@pytest.mark.parametrize(("peak", "speaks"), [(73.5e9, True), (73.6e9, False), (73.7e9, False)])
def test_recomputation_that_memory_could_spare(
    peak: float, speaks: bool, gpu_report: Report
) -> None:
    gpu_report["training_parameters"]["gradient_checkpointing"] = True
    gpu_report["plan"]["without_checkpointing_peak_bytes"] = peak  # of 80 GB
    gpu_report["model"] |= {"flops_per_token_model": 3e9, "flops_per_token_hardware": 4e9}
    found = findings_by_code(gpu_report)
    assert ("recomputation" in found) is speaks
    if speaks:
        seconds = gpu_report["time"]["train_s"] / 4
        assert found["recomputation"].worth_usd == pytest.approx(2.49 * seconds / 3600)


def test_kept_activations_are_not_recomputed(gpu_report: Report) -> None:
    gpu_report["plan"]["without_checkpointing_peak_bytes"] = 1
    assert "recomputation" not in findings_by_code(gpu_report)


def _hardware(report: Report) -> Report:
    hardware: Report = report["training_report"]["hardware"]
    return hardware


def _set(report: Report, **medians: float | None) -> Report:
    for name, value in medians.items():
        stats = (
            None if value is None else {**_hardware(report)["power_w"], "mean": value, "p50": value}
        )
        _hardware(report)[name] = stats
    return report


def test_idle_card_names_its_cause_only_where_times_tell_it(gpu_report: Report) -> None:
    _set(gpu_report, any_kernel_percent=50.0)
    assert "do not tell why" in findings_by_code(gpu_report)["idle-card"].evidence
    gpu_report["time"]["eval_s"] = 2_600.0  # which keeps a card busy
    assert "do not tell why" in findings_by_code(gpu_report)["idle-card"].evidence
    gpu_report["time"] |= {"eval_s": 75.6, "data_wait_s": 2_600.0}
    assert "data took 49 % of wall time" in findings_by_code(gpu_report)["idle-card"].evidence


def test_heat_alone_is_no_fault_and_cold_is_none_either(gpu_report: Report) -> None:
    codes = set(findings_by_code(gpu_report))
    for degrees in (99.0, 31.0):
        assert set(findings_by_code(_set(gpu_report, temperature_c=degrees))) == codes


@pytest.mark.parametrize(
    "change", ["no accumulation", "odd", "memory was short", "more than planned"]
)
def test_no_advice_to_fill_memory(change: str, gpu_report: Report) -> None:
    gpu_report["plan"]["next_micro_batch_peak_bytes"] = 70e9
    assert "memory-room" in findings_by_code(gpu_report)
    if change == "no accumulation":
        gpu_report["training_parameters"]["gradient_accumulation_steps"] = 1
    elif change == "odd":  # half of it is another global batch
        gpu_report["training_parameters"]["gradient_accumulation_steps"] = 3
    elif change == "memory was short":
        retry = {"micro_batch_size": 8, "n_accumulation_steps": 4}
        gpu_report["training_report"]["training"]["memory_retries"] = [retry]
    else:  # the run took 10 % more than predicted, so the next one would, too
        _hardware(gpu_report)["memory_peak_reserved_bytes"] = 1.1 * 63e9
    assert "memory-room" not in findings_by_code(gpu_report)


def test_licence_and_leak_come_up(gpu_report: Report) -> None:
    assert not {"no-licence", "held-out-leak"} & set(findings_by_code(gpu_report))
    gpu_report["data"]["sources"][0]["licence"] = None
    gpu_report["evaluation"]["documents_shared_with_training"] = 3
    assert "text-to-sql" in findings_by_code(gpu_report)["no-licence"].evidence
    assert findings_by_code(gpu_report)["held-out-leak"].severity == "problem"


@pytest.mark.parametrize(
    ("left_out", "kept", "speaks"),
    [(99, 201, False), (100, 200, False), (101, 199, True), (20, 9, False), (20, 10, True)],
)
def test_much_of_a_source_left_out(
    left_out: int, kept: int, speaks: bool, gpu_report: Report
) -> None:
    gpu_report["data"]["sources"][1] |= {"n_left_out": left_out, "n_train": kept, "n_held_out": 0}
    found = findings_by_code(gpu_report)
    assert ("data-left-out" in found) is speaks
    if speaks:
        # what a cap took may all have been of this source
        gpu_report["data"]["dropped_by_reason"]["over_source_cap"] = left_out - 1
        assert "data-left-out" not in findings_by_code(gpu_report)
        assert "of generated-shops" in found["data-left-out"].evidence


PARTS = ("startup_s", "data_wait_s", "h2d_s", "train_s", "checkpoint_s", "eval_s", "other_s")


@given(st.lists(st.floats(0, 1e5), min_size=len(PARTS), max_size=len(PARTS)), st.floats(1, 4))
def test_all_fixes_together_save_at_most_the_cost(
    gpu_inputs: ReportInputs, seconds: list[float], factor: float
) -> None:
    report = build_report(gpu_inputs, {})
    report["time"] |= dict(zip(PARTS, seconds, strict=True)) | {"wall_s": sum(seconds)}
    report["training_parameters"]["gradient_checkpointing"] = True
    report["plan"]["without_checkpointing_peak_bytes"] = 1
    model = report["model"]
    model["flops_per_token_hardware"] = factor * model["flops_per_token_model"]
    cost = report["cost"]["usd_per_hour"] * sum(seconds) / 3600
    worth = sum(finding.worth_usd or 0.0 for finding in find(report))
    assert worth <= cost * (1 + 1e-9)


def test_what_weighs_most_comes_first(gpu_report: Report) -> None:
    gpu_report["evaluation"]["documents_shared_with_training"] = 3
    gpu_report["time"] |= {"data_wait_s": 300.0, "eval_s": 600.0}
    gpu_report["training_parameters"]["total_steps"] = 49
    codes = [finding.code for finding in find(gpu_report)]
    assert codes[:3] == ["held-out-leak", "evaluation-time", "data-wait"]
    assert codes.index("few-steps") > codes.index("checkpoint-time")


def test_every_finding_says_how_its_worth_came_about(
    gpu_report: Report, cpu_report: Report
) -> None:
    findings = [*gpu_report["findings"], *cpu_report["findings"]]
    assert findings and all(finding["worth_reason"] for finding in findings)


@pytest.mark.parametrize(
    ("path", "op", "value", "expected"),
    [
        ("evaluation.delta.value_fraction", ">", 0.1, "pass"),
        ("evaluation.after.held_out_loss", "<=", 0.5, "fail"),
        ("run.preset", "==", "full", "pass"),
        ("training_report.training.epoch_summaries[1].steps", ">=", 900, "pass"),
        ("training_report.hardware.tensor_active_percent.mean", ">", 25, "pass"),
    ],
)
def test_acceptance(path: str, op: Any, value: Any, expected: str, gpu_report: Report) -> None:
    (result,) = accept(gpu_report, (AcceptanceRule(path=path, op=op, value=value),))
    assert result.verdict == expected
    assert result.rule == f"{path} {op} {value}"


def test_bar_below_a_null_is_not_measured(cpu_report: Report) -> None:
    path = "training_report.hardware.tensor_active_percent.mean"
    (result,) = accept(cpu_report, (AcceptanceRule(path=path, op=">", value=25),))
    assert (result.verdict, result.value) == ("not measured", None)


@pytest.mark.parametrize(("path", "value"), [("cost.eur", 1), ("run.preset", 3), ("cost", 3)])
def test_acceptance_that_cannot_be_judged(path: str, value: Any, gpu_report: Report) -> None:
    with pytest.raises(ConfigError, match=path):
        accept(gpu_report, (AcceptanceRule(path=path, op="<", value=value),))


@pytest.mark.parametrize(
    ("part", "expected"),
    [("data_wait_s", "data"), ("h2d_s", "data"), ("checkpoint_s", "checkpoint"),
     ("eval_s", "evaluation"), ("startup_s", "start-up"), ("other_s", "lost-work")],
)  # fmt: skip
def test_largest_part_of_wall_time(part: str, expected: str, gpu_report: Report) -> None:
    gpu_report["time"][part] = 9_000.0
    assert bottleneck(gpu_report)["class"] == expected


def test_the_rest_of_an_unbroken_run_is_start_up(gpu_report: Report) -> None:
    gpu_report["training_report"]["training"]["sessions"] = 1
    gpu_report["time"]["other_s"] = 9_000.0
    assert bottleneck(gpu_report)["class"] == "start-up"


@pytest.mark.parametrize(
    ("tensor", "sm", "kernel", "power_w", "expected"),
    [
        (50.0, 90.0, 97.0, 650.0, "compute"),
        (49.9, 90.0, 97.0, 650.0, "step"),
        (24.9, 80.1, 97.0, 400.0, "memory-bound kernels"),
        (24.9, 60.0, 97.0, 400.0, "small kernels"),
        (None, None, 97.0, 400.0, "small kernels"),
        (None, None, 97.0, 600.0, "step"),
        (None, None, None, None, "step"),
    ],
)
def test_counters_name_the_limit_inside_a_step(
    tensor: float | None,
    sm: float | None,
    kernel: float | None,
    power_w: float | None,
    expected: str,
    gpu_report: Report,
) -> None:
    _set(gpu_report, tensor_active_percent=tensor, sm_active_percent=sm, any_kernel_percent=kernel)
    found = bottleneck(_set(gpu_report, power_w=power_w))
    assert found["class"] == expected
    assert found["confidence"] == ("medium" if expected == "step" else "high")


@pytest.mark.parametrize(("mfu", "expected"), [(0.40, "compute"), (0.39, "step")])
def test_without_counters_utilisation_shows_arithmetic(
    mfu: float, expected: str, gpu_report: Report
) -> None:
    _set(gpu_report, tensor_active_percent=None, sm_active_percent=None)
    gpu_report["throughput"]["mfu_fraction"] = mfu
    assert bottleneck(gpu_report)["class"] == expected


def test_few_samples_are_no_evidence(gpu_report: Report) -> None:
    _set(gpu_report, tensor_active_percent=60.0)
    gpu_report["training_report"]["hardware"]["samples"] = 19
    assert bottleneck(gpu_report)["class"] == "step"


def test_a_short_run_is_not_sure_of_anything(gpu_report: Report) -> None:
    gpu_report["time"] |= {"wall_s": 59.0, "startup_s": 9_000.0}
    assert bottleneck(gpu_report) | {"evidence": []} == {
        "class": "start-up",
        "confidence": "low",
        "evidence": [],
    }


def test_no_time_no_answer(gpu_report: Report) -> None:
    for part in gpu_report["time"]:
        gpu_report["time"][part] = 0.0
    assert bottleneck(gpu_report)["class"] == "unknown"


@pytest.mark.parametrize("n_sessions", [1, 2])
def test_a_long_wait_for_the_profile_is_neither_lost_nor_start_up(
    n_sessions: int, gpu_report: Report
) -> None:
    gpu_report["training_report"]["training"] |= {"sessions": n_sessions, "memory_retries": []}
    gpu_report["profile"]["pause_s"] = 0.0
    shares, found = time_shares(gpu_report), [finding.code for finding in find(gpu_report)]
    gpu_report["time"]["other_s"] += 9_000.0
    gpu_report["time"]["wall_s"] += 9_000.0
    assert time_shares(gpu_report) != pytest.approx(shares)
    gpu_report["profile"]["pause_s"] = 9_000.0
    assert time_shares(gpu_report) == pytest.approx(shares)
    assert [finding.code for finding in find(gpu_report)] == found


def test_a_wait_in_work_that_was_thrown_away_takes_no_time_below_nothing(
    gpu_report: Report,
) -> None:
    gpu_report["profile"]["pause_s"] = gpu_report["time"]["other_s"] + 100.0
    assert min(time_shares(gpu_report).values()) >= 0
