"""A joined ablation: textbook intervals, claims next to measurements, and bars."""

import math
from typing import Any

import numpy as np
import pytest
from ablation_records import claim, hopeless, measured, plain, spec_of, variant
from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.plan.records import TrainPlan
from expertflow.studies.ablation import join_ablation, judge_claim
from expertflow.studies.compare_trials import IS_ONE, divide_estimates, estimate_ratio, t_quantile
from expertflow.studies.records import AblationRecord, AblationSpec, ClaimVerdict, VariantRecord

TWICE = (1.95, 2.0, 2.05)


@pytest.mark.parametrize(
    ("n", "value"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (10, 2.2281), (49, 2.0096)],
)
def test_quantiles_are_those_of_the_tables(n: int, value: float) -> None:
    assert t_quantile(n) == pytest.approx(value, abs=1e-4)


def test_an_interval_is_that_of_the_logarithms() -> None:
    # Logarithms -0.1, 0, 0.1: mean 0, deviation 0.1, half-width 4.3027 * 0.1 / sqrt(3).
    found = estimate_ratio([math.exp(-0.1), 1.0, math.exp(0.1)])
    assert found.value == pytest.approx(1)
    assert math.log(found.high) == pytest.approx(4.3027 * 0.1 / math.sqrt(3), abs=1e-5)
    assert found.low == pytest.approx(1 / found.high)
    assert (found.least, found.most) == (math.exp(-0.1), math.exp(0.1))


def test_quotients_add_half_widths_in_squares() -> None:
    of, to = estimate_ratio([1.9, 2.0, 2.1]), estimate_ratio([0.5, 0.52, 0.48])
    found = divide_estimates(of, to)
    assert found.value == pytest.approx(of.value / to.value)
    squares = [math.log(e.high / e.value) ** 2 for e in (of, to)]
    assert math.log(found.high / found.value) ** 2 == pytest.approx(sum(squares))
    assert found.least == pytest.approx(1.9 / 0.52) and found.most == pytest.approx(2.1 / 0.48)
    assert divide_estimates(of, IS_ONE).low == pytest.approx(of.low)


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(0)
    found = [estimate_ratio(np.exp(rng.normal(0.3, 0.1, 3)).tolist()) for _ in range(2000)]
    held = np.mean([e.low <= math.exp(0.3) <= e.high for e in found])
    assert held == pytest.approx(0.95, abs=0.015)


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
        (TWICE, {}, "measured"),
        ((2.0, 2.2, 2.4), {"low": 1.2, "high": 2.0}, "not decided"),
        ((0.9, 1.0, 1.1), {"low": 1.2, "high": 2.0}, "no change"),
        ((0.5, 0.51, 0.49), {"low": 1.2, "high": 2.0}, "less"),
    ],
)
def test_a_verdict_follows_from_the_interval(
    ratios: tuple[float, ...], bounds: dict[str, float], expected: str
) -> None:
    found = verdict("fast", "plan", measured("fast", *ratios), **bounds)
    assert found.verdict == expected
    assert found.measured == measured("fast", *ratios).ratio


ALIKE = {"settings_sha256": "s"}
HALF = variant("half", metric="hours", saves=0.5)
HOURS = "600 steps of 1 s and 28 saves of 2 s"


@pytest.mark.parametrize(
    ("of", "to", "records", "bounds", "expected", "said"),
    [
        ("v", "plan", [measured("v", 1.5, 1.9, 2.3)], {"low": 1.2, "high": 2.0}, "as claimed",
         "the interval reaches beyond what was said"),
        ("v", "plan", [measured("v", 1.5, 1.51, 1.52)], {"low": 1.2, "high": 2.0}, "as claimed",
         None),
        # Variants that are run alike are not compared; one that is the plan stands for it.
        ("a", "b", [measured(name, *TWICE, **ALIKE) for name in "ab"], {}, "not measurable",
         "a and b are one and the same here"),
        ("a", "b", [measured("a", *TWICE), plain("b")], {"low": 1.2, "high": 2.5}, "as claimed",
         "b is the plan here"),
        # What has no answer has a reason.
        ("a", "b", [plain("a", "TF32 is of CUDA cards"), plain("b")], {}, "not measurable",
         "one and the same here: TF32 is of CUDA cards"),
        ("a", "b", [measured("a", *TWICE), hopeless("b", "no compiler")], {}, "not measurable",
         "b: not measurable, no compiler"),
        ("half", "plan", [measured("half", 1.012, 1.012, 1.0121, variant=HALF, reason=HOURS)],
         {"low": 1.053, "high": 1.111}, "less", HOURS),
    ],
)  # fmt: skip
def test_a_verdict_has_its_reason(
    of: str, to: str, records: list[VariantRecord], bounds: Any, expected: str, said: str | None
) -> None:
    found = verdict(of, to, *records, **bounds)
    assert found.verdict == expected and (found.measured is None) is (expected == "not measurable")
    assert found.reason is None if said is None else said in (found.reason or "")
    assert found.metric == ("hours" if of == "half" else "tokens_per_s")


def test_the_plan_against_a_slower_variant_turns_the_ratio() -> None:
    found = verdict("plan", "slow", measured("slow", 0.19, 0.2, 0.21), low=5.0)
    assert found.measured is not None
    assert found.measured.value == pytest.approx(5, rel=0.01) and found.verdict == "as claimed"
    assert found.measured.least == pytest.approx(1 / 0.21)


def joined(
    plan: TrainPlan, spec: AblationSpec, *records: VariantRecord, price: float | None = None
) -> AblationRecord:
    plan = replace(plan, cost=replace(plan.cost, price_usd_per_hour=price))
    return join_ablation(spec, plan=plan, model="m", records=records)


def rungs() -> AblationSpec:
    names = ("naive", "middle", "end")
    return spec_of([variant(name, of="l", rung=i) for i, name in enumerate(names)])


def test_each_rung_is_worth_its_ratio_to_the_one_before(base: TrainPlan) -> None:
    naive, middle = measured("naive", 0.099, 0.1, 0.101), measured("middle", 0.39, 0.4, 0.41)
    record = joined(base, rungs(), naive, middle, plain("end"))
    first, second, last = record.bars
    assert record.ladders == (("naive", "middle", "end"),)
    assert first.step is None
    assert second.step is not None and second.step.value == pytest.approx(4, rel=0.01)
    assert last.step is not None and last.step.value == pytest.approx(2.5, rel=0.01)
    # The rungs' steps multiply to the total.
    assert second.step.value * last.step.value == pytest.approx(10, rel=0.01)
    assert last.ratio is None and last.tokens_per_s == record.plan_tokens_per_s == 100


def test_a_rung_that_is_run_as_the_one_before_is_worth_nothing(base: TrainPlan) -> None:
    naive = measured("naive", 0.39, 0.4, 0.41, settings_sha256="a")
    middle = measured("middle", 0.5, 0.6, 0.7, settings_sha256="a", reason="not compiled")
    first, second, last = joined(base, rungs(), naive, middle, plain("end")).bars
    assert second.step is None and second.ratio == first.ratio == naive.ratio
    assert second.reason == "as the rung before on this hardware; not compiled"
    assert last.step is not None and last.step.value == pytest.approx(2.5, rel=0.01)
    other = replace(middle, settings_sha256="b")
    assert joined(base, rungs(), naive, other, plain("end")).bars[1].step is not None


def test_bars_are_of_one_plan_speed_though_the_machine_changed(base: TrainPlan) -> None:
    records = measured("naive", 0.5, 0.5, 0.5, plan=80), measured("middle", 0.5, 0.5, 0.5, plan=120)
    record = joined(base, rungs(), *records, plain("end"))
    assert record.plan_tokens_per_s == 100
    assert [bar.tokens_per_s for bar in record.bars] == pytest.approx([50, 50, 100])


def test_dollars_need_a_price(base: TrainPlan) -> None:
    spec, record = spec_of([variant("v")]), measured("v", 0.5, 0.5, 0.5)
    free = joined(base, spec, record)
    assert free.plan_usd_per_million_tokens is free.bars[0].usd_per_million_tokens is None
    assert "price_usd_per_hour" in free.unavailable["usd_per_million_tokens"]
    paid = joined(base, spec, record, price=3.6)
    # 100 tokens/s are 10,000 s a million, at 0.001 dollars a second.
    assert paid.plan_usd_per_million_tokens == pytest.approx(10)
    assert paid.bars[0].usd_per_million_tokens == pytest.approx(20)
    assert not paid.unavailable


def test_what_was_not_measured_keeps_its_reason(base: TrainPlan) -> None:
    record = joined(base, rungs(), hopeless("naive", "no memory", "out of memory"),
                    measured("middle", 0.4, 0.4, 0.4), plain("end"))  # fmt: skip
    bar = record.bars[0]
    assert (bar.outcome, bar.reason, bar.ratio) == ("out of memory", "no memory", None)
    assert bar.tokens_per_s is bar.peak_memory_bytes is bar.padding_fraction is None
    assert record.bars[1].step is None and record.bars[2].step is not None


def test_one_process_for_several_is_told(base: TrainPlan) -> None:
    two = replace(base, world_size=2)
    record = joined(two, spec_of([variant("v")]), measured("v", 2, 2, 2.1), price=1.0)
    assert any("2 processes; all runs here are of one" in note for note in record.notes)
    # The price may be for one card or for two.
    assert record.price_usd_per_hour is record.plan_usd_per_million_tokens is None
    assert "for 2 processes" in record.unavailable["usd_per_million_tokens"]


def test_records_of_another_plan_or_none_are_refused(base: TrainPlan) -> None:
    spec = spec_of([variant("a"), variant("b")])
    with pytest.raises(DataError, match="'b' has no record"):
        joined(base, spec, measured("a", 1, 1, 1))
    with pytest.raises(DataError, match="2 different plans"):
        joined(base, spec, measured("a", 1, 1, 1), measured("b", 1, 1, 1, plan_sha256="q"))
