"""ablation.json: bars, rungs, dollars, and what is said of all of it."""

import pytest
from ablation_records import hopeless, measured, plain, spec_of, variant
from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.plan.records import TrainPlan
from expertflow.studies.ablation import join_ablation
from expertflow.studies.records import AblationRecord, AblationSpec, VariantRecord


@pytest.fixture
def plan(full_plan: TrainPlan) -> TrainPlan:
    return full_plan


def joined(
    plan: TrainPlan, spec: AblationSpec, *records: VariantRecord, price: float | None = None
) -> AblationRecord:
    plan = replace(plan, cost=replace(plan.cost, price_usd_per_hour=price))
    return join_ablation(spec, plan=plan, model="m", records=records)


def rungs() -> AblationSpec:
    names = ("naive", "middle", "end")
    return spec_of([variant(name, of="l", rung=i) for i, name in enumerate(names)])


def test_each_rung_is_worth_its_ratio_to_the_one_before(plan: TrainPlan) -> None:
    naive, middle = measured("naive", 0.099, 0.1, 0.101), measured("middle", 0.39, 0.4, 0.41)
    record = joined(plan, rungs(), naive, middle, plain("end"))
    first, second, last = record.bars
    assert record.ladders == (("naive", "middle", "end"),)
    assert first.step is None
    assert second.step is not None and second.step.value == pytest.approx(4, rel=0.01)
    assert last.step is not None and last.step.value == pytest.approx(2.5, rel=0.01)
    # The rungs' worth multiplies to the whole.
    assert second.step.value * last.step.value == pytest.approx(10, rel=0.01)
    assert last.ratio is None and last.tokens_per_s == record.plan_tokens_per_s == 100


def test_a_rung_that_is_run_as_the_one_before_is_worth_nothing(plan: TrainPlan) -> None:
    naive = measured("naive", 0.39, 0.4, 0.41, settings_sha256="a")
    middle = measured("middle", 0.5, 0.6, 0.7, settings_sha256="a", reason="not compiled")
    first, second, last = joined(plan, rungs(), naive, middle, plain("end")).bars
    assert second.step is None and second.ratio == first.ratio == naive.ratio
    assert second.reason == "as the rung before on this hardware; not compiled"
    assert last.step is not None and last.step.value == pytest.approx(2.5, rel=0.01)
    other = replace(middle, settings_sha256="b")
    assert joined(plan, rungs(), naive, other, plain("end")).bars[1].step is not None


def test_bars_are_of_one_plan_speed_though_the_machine_changed(plan: TrainPlan) -> None:
    records = measured("naive", 0.5, 0.5, 0.5, plan=80), measured("middle", 0.5, 0.5, 0.5, plan=120)
    record = joined(plan, rungs(), *records, plain("end"))
    assert record.plan_tokens_per_s == 100
    assert [bar.tokens_per_s for bar in record.bars] == pytest.approx([50, 50, 100])


def test_dollars_need_a_price(plan: TrainPlan) -> None:
    spec, record = spec_of([variant("v")]), measured("v", 0.5, 0.5, 0.5)
    free = joined(plan, spec, record)
    assert free.plan_usd_per_million_tokens is free.bars[0].usd_per_million_tokens is None
    assert "price_usd_per_hour" in free.unavailable["usd_per_million_tokens"]
    paid = joined(plan, spec, record, price=3.6)
    # 100 tokens/s are 10,000 s a million, at 0.001 dollars each.
    assert paid.plan_usd_per_million_tokens == pytest.approx(10)
    assert paid.bars[0].usd_per_million_tokens == pytest.approx(20)
    assert not paid.unavailable


def test_what_was_not_measured_keeps_its_reason(plan: TrainPlan) -> None:
    record = joined(plan, rungs(), hopeless("naive", "no memory", "out of memory"),
                    measured("middle", 0.4, 0.4, 0.4), plain("end"))  # fmt: skip
    bar = record.bars[0]
    assert (bar.outcome, bar.reason, bar.ratio) == ("out of memory", "no memory", None)
    assert bar.tokens_per_s is bar.peak_memory_bytes is bar.padding_fraction is None
    assert record.bars[1].step is None and record.bars[2].step is not None


def test_an_odd_loss_is_told(plan: TrainPlan) -> None:
    odd = measured("v", 2, 2, 2.1, loss_differs=0.5, loss_bound=0.01, is_sane=False)
    record = joined(plan, spec_of([variant("v")]), odd)
    assert record.bars[0].is_sane is False and record.bars[0].loss_differs == 0.5
    assert any("the loss of v is further" in note for note in record.notes)


def test_one_process_for_several_is_told(plan: TrainPlan) -> None:
    two = replace(plan, world_size=2)
    record = joined(two, spec_of([variant("v")]), measured("v", 2, 2, 2.1), price=1.0)
    assert any("2 processes; all runs here are of one" in note for note in record.notes)
    # Whether the price is that of one card or of two is not known.
    assert record.price_usd_per_hour is record.plan_usd_per_million_tokens is None
    assert "for 2 processes" in record.unavailable["usd_per_million_tokens"]


def test_records_of_another_plan_or_none_are_refused(plan: TrainPlan) -> None:
    spec = spec_of([variant("a"), variant("b")])
    with pytest.raises(DataError, match="'b' has no record"):
        joined(plan, spec, measured("a", 1, 1, 1))
    with pytest.raises(DataError, match="2 different plans"):
        joined(plan, spec, measured("a", 1, 1, 1), measured("b", 1, 1, 1, plan_sha256="q"))
