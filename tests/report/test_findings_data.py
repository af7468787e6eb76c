"""Rules over the data: at, below and above their thresholds."""

from typing import Any

import pytest
from report_reading import findings_by_code

Report = dict[str, Any]


def test_padding_is_said_and_not_priced(gpu_report: Report) -> None:
    gpu_report["data"]["padding_fraction"] = 0.2
    found = findings_by_code(gpu_report)["padding"]
    assert found.worth_usd is None and found.worth_reason


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
