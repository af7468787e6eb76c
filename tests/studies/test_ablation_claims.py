"""What was said beside what was measured."""

from typing import Any

import pytest
from ablation_records import claim, hopeless, measured, plain, variant

from expertflow.studies.ablation import judge_claim
from expertflow.studies.records import ClaimVerdict, VariantRecord

TWICE = (1.95, 2.0, 2.05)


def verdict(of: str, to: str, *records: VariantRecord, **bounds: Any) -> ClaimVerdict:
    by_name = {record.variant.name: record for record in records}
    return judge_claim(claim(of, to, **bounds), by_name)


@pytest.mark.parametrize(
    ("ratios", "bounds", "expected"),
    [
        (TWICE, {"low": 1.2, "high": 2.0}, "as claimed"),
        (TWICE, {"low": 8.0, "high": 8.0}, "less"),
        (TWICE, {"low": 1.05, "high": 1.1}, "more"),
        (TWICE, {"low": 5.0}, "less"),
        (TWICE, {"low": 1.5}, "as claimed"),
        (TWICE, {}, "measured"),
        ((2.0, 2.2, 2.4), {"low": 1.2, "high": 2.0}, "not decided"),
        ((0.9, 1.0, 1.1), {"low": 1.2, "high": 2.0}, "no change"),
        ((0.9, 1.0, 1.1), {}, "no change"),
        ((0.5, 0.51, 0.49), {"low": 1.2, "high": 2.0}, "less"),
    ],
)
def test_a_verdict_follows_from_the_interval(
    ratios: tuple[float, ...], bounds: dict[str, float], expected: str
) -> None:
    found = verdict("fast", "plan", measured("fast", *ratios), **bounds)
    assert found.verdict == expected
    assert found.measured == measured("fast", *ratios).ratio


def test_a_claim_that_the_interval_reaches_beyond_is_told() -> None:
    wide = verdict("v", "plan", measured("v", 1.5, 1.9, 2.3), low=1.2, high=2.0)
    assert wide.verdict == "as claimed"
    assert wide.reason == "the interval reaches beyond what was said"
    narrow = verdict("v", "plan", measured("v", 1.5, 1.51, 1.52), low=1.2, high=2.0)
    assert (narrow.verdict, narrow.reason) == ("as claimed", None)


def test_variants_that_are_run_alike_are_not_compared() -> None:
    a, b = (measured(name, *TWICE, settings_sha256="s") for name in "ab")
    found = verdict("a", "b", a, b)
    assert (found.verdict, found.reason) == ("not measurable", "a and b are one and the same here")


def test_the_plan_against_a_slower_variant_turns_the_ratio() -> None:
    found = verdict("plan", "slow", measured("slow", 0.19, 0.2, 0.21), low=5.0)
    assert found.measured is not None
    assert found.measured.value == pytest.approx(5, rel=0.01) and found.verdict == "as claimed"
    assert found.measured.least == pytest.approx(1 / 0.21)


def test_a_variant_that_is_the_plan_stands_for_it() -> None:
    found = verdict("a", "b", measured("a", *TWICE), plain("b"), low=1.2, high=2.5)
    assert found.verdict == "as claimed" and "b is the plan here" in (found.reason or "")


def test_what_has_no_answer_has_a_reason() -> None:
    both = verdict("a", "b", plain("a", "TF32 is of CUDA cards"), plain("b"))
    assert both.verdict == "not measurable" and both.measured is None
    assert "one and the same here: TF32 is of CUDA cards" in (both.reason or "")
    same = verdict("a", "plan", plain("a"))
    assert same.verdict == "not measurable"
    none = verdict("a", "b", measured("a", *TWICE), hopeless("b", "no compiler"))
    assert none.verdict == "not measurable" and none.reason == "b: not measurable, no compiler"
    full = verdict("a", "plan", hopeless("a", "CUDA out of memory", "out of memory"))
    assert full.verdict == "not measurable" and "out of memory" in (full.reason or "")


def test_hours_say_their_arithmetic() -> None:
    saves = measured(
        "half", 1.012, 1.012, 1.0121, variant=variant("half", metric="hours", saves=0.5)
    )
    told = VariantRecord(**{**_fields(saves), "reason": "600 steps of 1 s and 28 saves of 2 s"})
    found = verdict("half", "plan", told, low=1.053, high=1.111)
    assert (found.verdict, found.metric) == ("less", "hours")
    assert found.reason == "600 steps of 1 s and 28 saves of 2 s"


def _fields(record: VariantRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
