"""Ladders up to the plan: factors that multiply to the whole, rungs that could not be measured."""

import math

import pytest
from made_up_ablation import LADDER, PLAN_TOKENS_PER_S, estimate, make_ablation, make_bar
from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.report.ablation_facts import Ladder, changes, is_faster, ladders
from expertflow.report.ablation_page import lines
from expertflow.studies.records import AblationRecord, Bar


def _record(*rungs: Bar) -> AblationRecord:
    return make_ablation(bars=rungs, ladders=(tuple(bar.name for bar in rungs),))


def _rung(name: str, speed: float | None, before: float | None = None, **changed: object) -> Bar:
    return make_bar(name, name, speed, of=LADDER, before=before, **changed)


def _product(ladder: Ladder) -> float:
    return math.prod(step.factor.value for step in ladder.steps if step.factor)


def test_factors_multiply_to_the_whole_across_a_gap() -> None:
    ladder = ladders(make_ablation())[0]
    assert [step.label for step in ladder.missing] == ["bf16 products"]
    assert ladder.whole.value == pytest.approx(1 / 0.031)
    assert _product(ladder) == pytest.approx(ladder.whole.value)
    assert ladder.steps[-1].is_plan and ladder.steps[-1].tokens_per_s == PLAN_TOKENS_PER_S


def test_the_step_after_a_gap_has_the_widest_interval() -> None:
    step = ladders(make_ablation())[0].steps[5]
    before, after = estimate(0.157), estimate(0.81)
    assert step.factor is not None
    assert step.factor.low == pytest.approx(after.low / before.high)
    assert step.factor.high == pytest.approx(after.high / before.low)


def test_the_whole_is_turned_with_its_interval() -> None:
    whole, first = ladders(make_ablation())[0].whole, estimate(0.031)
    assert (whole.low, whole.high) == pytest.approx((1 / first.high, 1 / first.low))
    assert whole.least < whole.low < whole.value < whole.high < whole.most


def test_steps_that_do_not_multiply_are_refused() -> None:
    record = make_ablation()
    bars = [replace(bar, step=estimate(9.0)) if bar.name == "batch" else bar for bar in record.bars]
    with pytest.raises(DataError, match="steps of from_naive multiply to"):
        ladders(replace(record, bars=tuple(bars)))


def test_a_ladder_of_unknown_variants_is_refused() -> None:
    with pytest.raises(DataError, match="no variant 'gone'"):
        ladders(make_ablation(ladders=(("naive", "gone"),)))


def test_a_rung_that_is_the_plan_has_its_speed() -> None:
    same = {"outcome": "is the plan", "reason": "nothing would change", "ratio": None}
    ladder = ladders(
        _record(
            _rung("slow", 0.5),
            _rung("last", 1.0, 0.5, **same),
            _rung("none", 1.0, **same),
        )
    )[0]
    assert [step.factor and step.factor.value for step in ladder.steps] == [None, 2.0, None, None]
    assert [step.tokens_per_s for step in ladder.steps[1:]] == [PLAN_TOKENS_PER_S] * 3
    assert ladder.missing == ()


def test_a_rung_that_is_run_as_the_one_before_is_no_step() -> None:
    same = {"step": None, "reason": "as the rung before on this hardware"}
    record = _record(_rung("a", 0.5), _rung("b", 0.5, **same), _rung("c", 0.8, 0.5))
    (ladder,) = ladders(record)
    assert [step.factor is None for step in ladder.steps] == [True, True, False, False]
    assert [line.note for line in lines(record.bars, record)] == [None, same["reason"], None]


def test_without_a_measured_rung_there_is_no_ladder() -> None:
    assert ladders(_record(_rung("a", None), _rung("b", None))) == ()
    assert ladders(make_ablation(plan_tokens_per_s=None)) == ()
    assert ladders(make_ablation(ladders=())) == ()


def test_a_ladder_starts_where_something_was_measured() -> None:
    ladder = ladders(_record(_rung("a", None), _rung("b", 0.4), _rung("c", 0.8, 0.4)))[0]
    assert ladder.start.label == "b" and ladder.whole.value == pytest.approx(2.5)
    assert ladder.steps[1].factor is None  # nothing before it to compare with


def test_single_changes_go_from_slow_to_fast_and_blanks_last() -> None:
    assert [bar.name for bar in changes(make_ablation())] == [
        "recompute", "no-compile", "no-tf32", "workers-8", "batch-32", "fp8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "changed", "expected"),
    [
        (1.09, {}, True),
        (1.03, {}, False),  # its interval reaches below the bar
        (1.09, {"is_sane": False}, False),
        (1.09, {"is_sane": None}, True),
        (1.09, {"metric": "hours"}, False),
        (None, {}, False),
    ],
)
def test_faster_is_beyond_doubt_and_learns_as_well(
    ratio: float | None, changed: dict[str, object], expected: bool
) -> None:
    assert is_faster(make_bar("x", "x", ratio, **changed)) is expected
