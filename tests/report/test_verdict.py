"""The sentence that sums a run up."""

from typing import Any

from expertflow.report.verdict import verdict

Report = dict[str, Any]


def test_verdict_needs_more_than_chance(gpu_report: Report) -> None:
    assert verdict(gpu_report)["learned"] == "yes"
    gpu_report["evaluation"]["delta"]["ci95"] = [-0.01, 0.03]
    unclear = verdict(gpu_report)
    assert (unclear["level"], unclear["learned"]) == ("mixed", "unclear")
    gpu_report["evaluation"]["delta"]["ci95"] = [-0.2, -0.1]
    assert verdict(gpu_report)["level"] == "bad"


def test_verdict_without_metric_goes_by_loss(gpu_report: Report) -> None:
    gpu_report["evaluation"]["delta"]["ci95"] = None
    assert "Held-out loss fell from 1.874 to 0.566" in verdict(gpu_report)["sentence"]
    gpu_report["evaluation"]["after"]["held_out_loss"] = 2.0
    assert verdict(gpu_report)["learned"] == "no"


def test_verdict_does_not_trust_a_leak(gpu_report: Report) -> None:
    gpu_report["evaluation"]["documents_shared_with_training"] = 1
    assert verdict(gpu_report)["learned"] == "unclear"


def test_failed_bars_are_in_the_answer(gpu_report: Report) -> None:
    assert gpu_report["verdict"]["answer"] == "Yes, but 1 of 3 acceptance bars failed."
    assert gpu_report["verdict"]["level"] == "mixed"
