"""The wait for a profile was asked for: it is nobody's loss."""

from typing import Any

import pytest

from expertflow.report.diagnose import find
from expertflow.report.findings.evidence import time_shares

Report = dict[str, Any]


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
