"""The ablation: ladders, its page, and its section in the report."""

import re
from typing import Any

import pytest
from made_up_ablation import PLAN_TOKENS_PER_S, SHORT, estimate, make_ablation
from made_up_ablation import make_bar as bar
from made_up_runs import GPU, PROVENANCE
from msgspec.structs import replace
from report_reading import (
    check_page_is_safe,
    compare_with_golden,
    hostile,
    lines_of,
    section,
    text_of,
)

from expertflow.core.records import from_json, to_json
from expertflow.report.ablation_facts import Ladder, build_ladders, is_faster
from expertflow.report.ablation_page import judge_ablation, make_ablation_tiles, render_ablation
from expertflow.report.build import build_report
from expertflow.report.check import check_report
from expertflow.report.measured import Missing
from expertflow.report.page import render_page
from expertflow.studies.records import AblationRecord, Bar

AS_PLAN: dict[str, Any] = {"outcome": "is the plan", "reason": "no change", "ratio": None}


def _ladder(*rungs: Bar, singles: tuple[Bar, ...] = (), **changes: Any) -> AblationRecord:
    """Make the record of one ladder, and of single changes."""
    names = tuple(rung.name for rung in rungs)
    ladder = tuple(replace(rung, of="from_naive") for rung in rungs)
    ladders = (names,) if names else ()
    return make_ablation(bars=(*ladder, *singles), ladders=ladders, **changes)


def _built(record: AblationRecord) -> Ladder:
    (ladder,) = build_ladders(record)
    return ladder


def test_a_rung_that_equals_the_plan_or_the_previous_one_is_not_a_step() -> None:
    last, none = bar("last", "", 1.0, before=0.5, **AS_PLAN), bar("none", "", 1.0, **AS_PLAN)
    ladder = _built(_ladder(bar("slow", "", 0.5), last, none))
    assert [step.factor and step.factor.value for step in ladder.steps] == [None, 2.0, None, None]
    assert [step.tokens_per_s for step in ladder.steps[1:]] == [PLAN_TOKENS_PER_S] * 3
    assert all(step.tokens_per_s for step in ladder.steps)
    why = "same as the previous rung on this hardware"
    same = replace(bar("b", "b", 0.5), reason=why)
    record = _ladder(bar("a", "a", 0.5), same, bar("c", "c", 0.8, before=0.5))
    assert [step.factor is None for step in _built(record).steps] == [True, True, False, False]
    assert text_of(render_ablation(record)).count(why) == 1


def test_a_ladder_starts_where_something_was_measured() -> None:
    none = bar("a", "a", None)
    assert build_ladders(_ladder(none, bar("b", "b", None))) == ()
    assert build_ladders(make_ablation(plan_tokens_per_s=None)) == ()
    assert build_ladders(_ladder()) == ()
    ladder = _built(_ladder(none, bar("b", "b", 0.4), bar("c", "c", 0.8, before=0.4)))
    assert ladder.start.label == "b" and ladder.whole.value == pytest.approx(2.5)
    assert ladder.steps[1].factor is None  # nothing before it to compare with
    gap = _built(_ladder(bar("b", "b", 0.4), none, bar("c", "c", 0.8)))
    assert gap.steps[2].factor == estimate(0.8).divide_by(estimate(0.4))
    none = (bar(name, name, None) for name in "abc")
    # Hours are not a speed.
    saves = bar("half", "half the saves", 1.05, metric="hours")
    why = "no variant was measured against the plan"
    no_speed = dict.fromkeys(("plan_tokens_per_s", "plan_usd_per_million_tokens"))
    missing = {"plan_tokens_per_s": why}
    record = _ladder(*none, singles=(saves,), claims=(), unavailable=missing, **no_speed)
    found = judge_ablation(record)
    assert (found.level, found.answer) == ("bad", "No training speed was measured.")
    assert SHORT in found.sentence
    assert make_ablation_tiles(record)[2].value == Missing(why)
    text = text_of(render_ablation(record))
    assert "No rung was measured." in text and "contain no claims" in text


def test_faster_needs_certainty_and_an_equal_loss() -> None:
    assert is_faster(bar("x", "x", 1.09)) and is_faster(bar("x", "x", 1.09, is_sane=None))
    assert not is_faster(bar("x", "x", 1.03)), "its interval reaches below the bar"
    for speed, changes in ((1.09, {"is_sane": False}), (1.09, {"metric": "hours"}), (None, {})):
        assert not is_faster(bar("x", "x", speed, **changes))
    odd = bar("x", "x", 1.2, is_sane=False, loss_differs=0.09, loss_bound=0.05)
    page = render_ablation(_ladder(singles=(odd,)))
    assert "differs: +9.0 % (\u00b15.0 %)" in text_of(page)
    assert judge_ablation(_ladder(singles=(odd,))).answer == "No change is measurably faster."
    drawing = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "loss differs" in drawing and "var(--red)" in drawing
    assert "var(--orange)" not in drawing and not re.findall(r'"#[0-9a-f]{3,6}"', drawing)


def test_the_plan_is_drawn_even_if_all_changes_are_much_faster() -> None:
    page = render_ablation(_ladder(singles=(bar("x", "x", 4.0),)))
    places = re.findall(r'<line transform="translate\((-?[\d.]+),0\)"[^>]*var\(--rule\)', page)
    assert len(places) == 1 and min(map(float, places)) > 0
    assert page.count("1 the plan<") == 1


def test_the_verdict_states_the_plans_worth() -> None:
    assert judge_ablation(make_ablation()).level == "mixed"
    found = judge_ablation(_ladder(bar("a", "a", 1.5), bar("b", "b", 1.2, before=1.5)))
    assert (found.level, found.answer) == ("bad", "Slower.")
    rungs, faster = (bar(name, name, 1.0, **AS_PLAN) for name in "ab"), bar("x", "More", 1.2)
    record = _ladder(*rungs, singles=(faster,), claims=())
    found = judge_ablation(record)
    assert (found.level, found.answer) == ("mixed", "One change is faster.")
    assert found.sentence.startswith("Faster than the plan here")
    assert make_ablation_tiles(record)[1].value == Missing("every rung is the plan")


def test_without_a_price_there_are_no_dollars() -> None:
    why = "no price is known for this hardware"
    bars = tuple(replace(each, usd_per_million_tokens=None) for each in make_ablation().bars)
    record = make_ablation(
        price_usd_per_hour=None, price_as_of=None, plan_usd_per_million_tokens=None, bars=bars,
        unavailable={"usd_per_million_tokens": why},
    )  # fmt: skip
    text = text_of(render_ablation(record))
    assert make_ablation_tiles(record)[2].value == Missing(why)
    assert f"$/M tokens: not measured, {why}." in text
    assert "$0" not in text and "$/M tokens tokens/s" not in text


def test_hostile_names_are_escaped_and_complete() -> None:
    plain = to_json(make_ablation(notes=("x",), unavailable={"a": "b"}))
    kept = {"outcome", "verdict", "metric", "of", "name", "ladders", "method"}
    page = render_ablation(
        from_json(AblationRecord, hostile(plain, kept, {"unavailable", "versions"}))
    )
    check_page_is_safe(page)
    assert page.count("</style>") == 1 and "{{ 7 * 7 }}" in page


def test_the_report_has_the_full_record_and_its_page_a_section() -> None:
    inputs = replace(GPU.short, ablation=make_ablation())
    report = build_report(inputs, PROVENANCE)
    check_report(report, inputs)
    assert report.comparison == (inputs.ablation,)
    shown = section(render_page(report, inputs), "comparison")
    compare_with_golden("comparison.txt", lines_of(shown))
    assert 'href="ablation.html"' in shown and "ablation.html" not in GPU.page
