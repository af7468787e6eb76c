"""Findings of planted problems, and at, below and above their limits; bars; the bottleneck."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import CPU, GPU, Run
from planted_runs import RUNS, Planted
from report_reading import changed, findings_by_code
from support import ROOT, SCRIPTS

from expertflow.config.bars import find_wrong_bars
from expertflow.core.errors import ConfigError
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.diagnose import apply_rule, find_bottleneck, list_findings
from expertflow.report.findings.evidence import time_shares
from expertflow.report.findings.lost_time import BROKEN_START, LOST_TIMES, WHOLE_START
from expertflow.report.measured import to_plain
from expertflow.report.records import AcceptanceRule, AcceptanceVerdict, Report


@pytest.mark.parametrize("planted", RUNS, ids=[planted.name for planted in RUNS])
def test_only_the_planted_problem_is_found(planted: Planted) -> None:
    inputs = planted.run.change(**planted.change)
    report = build_report(inputs, {})
    check_report(report, inputs)
    found = {finding.code: finding for finding in report.findings}
    assert set(found) == set(planted.must.split())
    if planted.must:
        first = found[planted.must.split()[0]]
        assert planted.words in f"{first.evidence}; {first.recommendation}"


def test_every_finding_is_planted_and_many_runs_have_none() -> None:
    text = "".join(
        path.read_text() for path in (SCRIPTS / "expertflow/report/findings").glob("*.py")
    )
    codes = set(re.findall(r'make_finding\(\s*"([a-z-]+)"', text))
    codes |= {code for code, *_ in (*LOST_TIMES, *WHOLE_START, *BROKEN_START)}
    planted = {code for run in RUNS for code in run.must.split()}
    assert planted == codes and len(codes) >= 40
    assert len(RUNS) >= 40 and sum(not run.must for run in RUNS) >= 15


HARDWARE = "training_report.hardware"
TENSOR, SM = "tensor_active_percent", "sm_active_percent"
KERNEL, POWER = "any_kernel_percent", "power_w"
STEPS, WALL_S = "training_report.training.steps", "time.wall_s"
TOTAL, WARM_UP = "training_parameters.total_steps", "training_parameters.warmup_steps"
PEAK = "plan.next_micro_batch_peak_bytes"
ACCUMULATION = "training_parameters.gradient_accumulation_steps"
SESSIONS = "training_report.training.sessions"
RETRIES = "training_report.training.memory_retries"
CHECKPOINTED = {
    "training_parameters.gradient_checkpointing": True,
    "model.flops_per_token_model": 3e9,
    "model.flops_per_token_hardware": 4e9,
}
WALL = "plan_against_actual.3.actual"
TRAIN = "time.train_s"
SOURCE = "data.sources.1"
# Parts of wall time and the share above which they count as lost; this run had two sessions.
LOST = {
    "data-wait": ("data_wait_s", 0.05),
    "checkpoint-time": ("checkpoint_s", 0.02),
    "evaluation-time": ("eval_s", 0.05),
    "start-up": ("startup_s", 0.10),
    "lost-work": ("other_s", 0.05),
}


Changes = dict[str, Any]


def _spent(part: str, share: float) -> Changes:
    return {"time.other_s": 0.0, WALL_S: 4_000.0, "profile": None, f"time.{part}": share * 4_000}


def _at(
    path: str, *cases: tuple[Any, bool | str], beside: Changes | None = None
) -> list[tuple[Changes, bool | str]]:
    return [({**(beside or {}), path: value}, expected) for value, expected in cases]


SAMPLES = f"{HARDWARE}.samples"
SPILLED, USED = f"{HARDWARE}.memory_spilled_bytes", f"{HARDWARE}.memory_used_bytes.max"
RETRY = {"after_step": 0, "micro_batch_size": 8, "n_accumulation_steps": 4, "message": "short"}
KEPT = "plan.without_checkpointing_peak_bytes"
# By code: the changed values, and whether the rule fires, or with which severity.
LIMITS: dict[str, list[tuple[Changes, bool | str]]] = {
    "memory-bound-kernels": [
        *_at(TENSOR, (24.9, True), (25.0, False), (None, False), beside={SM: 80.1}),
        *_at(SM, (80.0, False), (None, False), beside={TENSOR: 24.9}),
        *_at(SAMPLES, (19, False), (20, True), beside={TENSOR: 5.0}),
    ],
    "small-kernels": [
        *_at(KERNEL, (90.1, True), (90.0, False), (None, False), beside={POWER: 419.0, SM: None}),
        ({KERNEL: 90.1, POWER: 420.0, SM: None}, False),
        # Busy multiprocessors: the kernels are not small.
        *_at(SM, (81.0, False), (80.0, True), beside={KERNEL: 90.1, POWER: 419.0}),
    ],
    "memory-spilled": [
        *_at(SPILLED, (0.8e9, False), (0.9e9, True), beside={USED: 79e9}),
        *_at(USED, (72e9, False), (73e9, True), beside={SPILLED: 4e9}),
    ],
    "memory-room": [
        *_at(PEAK, (73.5e9, True), (73.6e9, False)),
        # Halving three would change the global batch.
        *_at(ACCUMULATION, (1, False), (3, False), beside={PEAK: 70e9}),
        ({PEAK: 70e9, RETRIES: [RETRY]}, False),
        # The run took 10 % longer than predicted, so the next one would, too.
        ({PEAK: 70e9, f"{HARDWARE}.memory_peak_reserved_bytes": 1.1 * 63e9}, False),
    ],
    "recomputation": [
        *_at(KEPT, (73.5e9, True), (73.6e9, False), beside=CHECKPOINTED),
        ({KEPT: 1}, False),
    ],
    "plan-missed": [
        *_at(WALL, (0.709, "warning"), (0.71, False), (0.77, False), (0.771, True)),
        # A prior counts less than a calibration, and covers only the steps.
        ({TRAIN: 3_600.0, "plan.calibrated": False}, "info"),
        ({TRAIN: 2_600.0, WALL: 2.0, "plan.calibrated": False}, False),
    ],
    "tokens-cut": _at("data.truncated_fraction", (0.05, False), (0.051, True)),
    "few-steps": [
        *_at(TOTAL, (50, False), (49, True), beside={WARM_UP: 9}),
        *_at(WARM_UP, (179, False), (180, True), beside={TOTAL: 900}),
    ],
    "data-left-out": [
        ({f"{SOURCE}.n_left_out": out, f"{SOURCE}.n_train": kept, f"{SOURCE}.n_held_out": 0}, said)
        for out, kept, said in ((100, 200, False), (101, 199, True), (20, 9, False), (20, 10, True))
    ],
    "data-wait": [
        ({STEPS: n_steps, WALL_S: wall_s, "time.data_wait_s": wall_s / 2}, speaks)
        for n_steps, wall_s, speaks in ((19, 4e3, False), (20, 4e3, True), (99, 59.9, False))
    ],
}
LOST_CASES = [
    (code, _spent(part, limit + above), above > 0)
    for code, (part, limit) in LOST.items()
    for above in (-0.001, 0.0, 0.001)
]


def _change(report: Report, changes: Changes) -> Report:
    """Change a report; the mean of a reading sets all its statistics."""
    full, stats = dict(changes), dict.fromkeys(("min", "max", "p95"), 1.0)
    for path in {TENSOR, SM, KERNEL, POWER} & set(changes):
        value = full.pop(path)
        whole = None if value is None else {**stats, "mean": value, "p50": value}
        full[f"{HARDWARE}.{path}"] = whole
    return changed(report, full)


@pytest.mark.parametrize(
    ("code", "changes", "expected"),
    [*((code, *case) for code, cases in LIMITS.items() for case in cases), *LOST_CASES],
)
def test_a_rule_fires_beyond_its_limit(code: str, changes: Changes, expected: bool | str) -> None:
    said = findings_by_code(_change(GPU.report, changes)).get(code)
    assert (said is not None) is bool(expected)
    if said:
        assert expected in (True, said.severity)


@pytest.mark.parametrize(
    ("code", "changes", "lost_s"),
    [
        *((code, _spent(part, 0.2), 800.0) for code, (part, _) in LOST.items()),
        ("recomputation", LIMITS["recomputation"][0][0], None),
    ],
)
def test_priced_time(code: str, changes: Changes, lost_s: float | None) -> None:
    report = _change(GPU.report, changes)
    lost_s = lost_s or report.time.train_s / 4
    worth = findings_by_code(report)[code].worth_usd
    assert worth == pytest.approx(2.49 * lost_s / 3_600)
    unpriced = findings_by_code(changed(report, {"cost.usd_per_hour": None}))[code]
    assert unpriced.worth_usd is None and "price" in (unpriced.worth_reason or "")


PARTS = ("startup_s", "data_wait_s", "h2d_s", "train_s", "checkpoint_s", "eval_s", "other_s")


@given(st.lists(st.floats(0, 1e5), min_size=len(PARTS), max_size=len(PARTS)), st.floats(1, 4))
def test_all_fixes_together_save_at_most_the_cost(seconds: list[float], factor: float) -> None:
    spent = {f"time.{part}": s for part, s in zip(PARTS, seconds, strict=True)}
    again = {**CHECKPOINTED, "model.flops_per_token_hardware": factor * 3e9, KEPT: 1}
    report = changed(GPU.report, {**spent, WALL_S: sum(seconds), **again})
    worth = sum(finding.worth_usd or 0.0 for finding in list_findings(report))
    assert worth <= 2.49 * sum(seconds) / 3600 * (1 + 1e-9)


def test_the_most_important_comes_first() -> None:
    changes = {"time.data_wait_s": 300.0, "time.eval_s": 600.0, TOTAL: 49}
    codes = [finding.code for finding in list_findings(changed(GPU.report, changes))]
    assert codes[:2] == ["evaluation-time", "data-wait"]
    assert codes.index("few-steps") > codes.index("checkpoint-time")


TENSOR_MEAN = f"{HARDWARE}.{TENSOR}.mean"


def test_acceptance() -> None:
    def judge(run: Run, path: str, op: Any, value: Any) -> AcceptanceVerdict:
        rule = AcceptanceRule(path=path, op=op, value=value)
        found = apply_rule(to_plain(run.report)[0], rule)
        assert found.rule == f"{path} {op} {value}"
        return found

    for path, op, value, expected in (
        ("evaluation.delta.value_fraction", ">", 0.1, "pass"),
        ("evaluation.after.held_out_loss", "<=", 0.5, "fail"),
        ("run.preset", "==", "full", "pass"),
        ("training_report.training.epoch_summaries[1].steps", ">=", 900, "pass"),
        (TENSOR_MEAN, ">", 25, "pass"),
    ):
        assert judge(GPU, path, op, value).verdict == expected
    result = judge(CPU, TENSOR_MEAN, ">", 25)
    assert (result.verdict, result.value) == ("not measured", None)
    assert result.reason == "no NVIDIA driver on this machine"
    unscored = {"a": {"ci95": None}, "unavailable": {"a.ci": "another", "a.ci95": "too few"}}
    bar = AcceptanceRule(path="a.ci95[0]", op=">", value=0)
    assert apply_rule(unscored, bar).reason == "too few"
    for path, value in (("cost.eur", 1), ("run.preset", 3), ("cost", 3)):
        with pytest.raises(
            ConfigError, match=rf"'{path}.{{,160}}; (see workflow/schemas|use a single)"
        ):
            judge(CPU, path, "<", value)
    bar = AcceptanceRule(path="verdict.learned", op="==", value="yes")
    with pytest.raises(ConfigError, match="no path 'verdict"):
        GPU.report_with(spec={"acceptance": (bar,)})


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        # Some keys contain dots, and no bar can reach them.
        for key in (key for key in value if "." not in key):
            yield from leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path[1:]


def test_a_bar_on_an_unknown_path_is_rejected_when_it_is_read() -> None:
    for run in (GPU, CPU):
        plain = to_plain(run.report)[0]
        del plain["acceptance"], plain["verdict"]
        assert not list(find_wrong_bars([{"path": path} for path in leaves(plain)]))
    for path, hint in (
        ("evaluation.delta.valu_fraction", "did you mean 'value_fraction'?"),
        ("cost.usd.mean", "'mean' is unknown; workflow/schemas/report.schema.yaml lists all"),
        ("findings[0].name", "'name' is unknown"),
        ("run.preset[0]", "'0' is unknown"),
        ("verdict.learned", "'verdict' is unknown"),
    ):
        [line] = find_wrong_bars([{"path": path}])
        assert hint in line


SHIPPED = sorted((ROOT / "config" / "experts").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_bars_of_the_sources_are_those_of_the_full_presets(path: Path) -> None:
    """All but B set some; each has its origin, exists in the report, and ignores demos."""
    manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
    bars, own = manifest.get("acceptance", []), manifest["demo"].get("acceptance", [])
    assert bool(bars) == (path.stem != "repository")
    assert {bar["path"] for bar in own} <= {"evaluation.after.value_fraction"}
    assert not bars or "acceptance" in manifest["demo"]
    origins = {key for key in manifest["origins"] if key.startswith("acceptance.")}
    assert origins == {f"acceptance.{bar['name']}" for bar in bars}
    for run in (GPU, CPU):
        plain = to_plain(run.report)[0]
        judged = [apply_rule(plain, AcceptanceRule(**bar)) for bar in bars]
        assert all(bar.reason for bar in judged if bar.verdict == "not measured")
        assert run is CPU or "not measured" not in {bar.verdict for bar in judged}


@pytest.mark.parametrize(
    ("changes", "expected", "confidence"),
    [
        ({"time.data_wait_s": 9_000.0}, "data", "medium"),
        ({"time.h2d_s": 9_000.0}, "data", "medium"),
        ({"time.checkpoint_s": 9_000.0}, "checkpoint", "medium"),
        ({"time.eval_s": 9_000.0}, "evaluation", "medium"),
        ({"time.startup_s": 9_000.0}, "start-up", "medium"),
        ({"time.other_s": 9_000.0}, "lost-work", "medium"),
        # The remainder of an uninterrupted run is start-up; a short run proves nothing.
        ({"time.other_s": 9_000.0, SESSIONS: 1}, "start-up", "medium"),
        ({"time.startup_s": 9_000.0, WALL_S: 59.0}, "start-up", "low"),
        # Counters name the limit inside a step; without them utilization shows arithmetic.
        ({TENSOR: 50.0, SM: 90.0, KERNEL: 97.0, POWER: 650.0}, "compute", "high"),
        ({TENSOR: 49.9, SM: 90.0, KERNEL: 97.0, POWER: 650.0}, "step", "medium"),
        ({TENSOR: 24.9, SM: 80.1, KERNEL: 97.0, POWER: 400.0}, "memory-bound kernels", "high"),
        ({TENSOR: 24.9, SM: 60.0, KERNEL: 97.0, POWER: 400.0}, "small kernels", "high"),
        ({TENSOR: None, SM: None, KERNEL: 97.0, POWER: 400.0}, "small kernels", "high"),
        ({TENSOR: None, SM: None, KERNEL: 97.0, POWER: 600.0}, "step", "medium"),
        ({TENSOR: None, SM: None, KERNEL: None, POWER: None}, "step", "medium"),
        ({TENSOR: None, SM: None, "throughput.mfu_fraction": 0.40}, "compute", "high"),
        ({TENSOR: None, SM: None, "throughput.mfu_fraction": 0.39}, "step", "medium"),
        ({TENSOR: 60.0, f"{HARDWARE}.samples": 19}, "step", "medium"),  # few are not evidence
    ],
)
def test_bottleneck(changes: Changes, expected: str, confidence: str) -> None:
    found = find_bottleneck(_change(GPU.report, changes))
    assert (found.class_, found.confidence) == (expected, confidence)


def test_a_wait_for_the_profile_makes_no_time_negative() -> None:
    report = changed(GPU.report, {"profile.pause_s": GPU.report.time.other_s + 100.0})
    assert min(time_shares(report).values()) >= 0
    report = changed(report, {f"time.{part}": 0.0 for part in PARTS})
    assert find_bottleneck(report).class_ == "unknown"
