"""The ablation: ladders, its page, and its section, finding and line in the report."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from made_up_ablation import (
    LADDER,
    NO_FP8,
    ONE_DISK,
    PLAN_TOKENS_PER_S,
    SHORT,
    estimate,
    make_ablation,
    make_bar,
)
from made_up_runs import PROVENANCE
from msgspec.structs import replace
from report_reading import MAX_PAGE_BYTES, changed, check_page_is_safe, hostile, section, text_of

from expertflow.core.errors import DataError
from expertflow.core.records import from_json, to_json
from expertflow.report.ablation_facts import build_ladders, is_faster
from expertflow.report.ablation_page import (
    in_a_line,
    judge_ablation,
    make_ablation_tiles,
    render_ablation,
)
from expertflow.report.build import build_report
from expertflow.report.charts import waterfall as charts_waterfall
from expertflow.report.check import check_report
from expertflow.report.findings.hardware import (
    ONE_PROCESS,
    OTHER_HARDWARE,
    find_slow_settings,
    recomputation_seconds,
)
from expertflow.report.inputs import ReportInputs
from expertflow.report.measured import Missing
from expertflow.report.page import render_page
from expertflow.report.records import Finding, Report
from expertflow.report.summary import summary_rows
from expertflow.studies.records import AblationRecord, Bar


def _record(*rungs: Bar) -> AblationRecord:
    return make_ablation(bars=rungs, ladders=(tuple(bar.name for bar in rungs),))


def _rung(name: str, speed: float | None, before: float | None = None, **changed: object) -> Bar:
    return make_bar(name, name, speed, of=LADDER, before=before, **changed)


def test_factors_multiply_to_the_whole_across_a_gap() -> None:
    ladder = build_ladders(make_ablation())[0]
    assert [step.label for step in ladder.missing] == ["bf16 products"]
    product = math.prod(step.factor.value for step in ladder.steps if step.factor)
    assert product == pytest.approx(ladder.whole.value) == pytest.approx(1 / 0.031)
    assert ladder.steps[-1].is_plan and ladder.steps[-1].tokens_per_s == PLAN_TOKENS_PER_S
    # The step after a gap has the widest interval.
    factor, before, after = ladder.steps[5].factor, estimate(0.157), estimate(0.81)
    assert factor is not None
    assert factor.low == pytest.approx(after.low / before.high)
    assert factor.high == pytest.approx(after.high / before.low)


def test_ladders_that_cannot_be_are_refused() -> None:
    record = make_ablation()
    bars = [replace(bar, step=estimate(9.0)) if bar.name == "batch" else bar for bar in record.bars]
    with pytest.raises(DataError, match="steps of from_naive multiply to"):
        build_ladders(replace(record, bars=tuple(bars)))
    with pytest.raises(DataError, match="no variant 'gone'"):
        build_ladders(make_ablation(ladders=(("naive", "gone"),)))


def test_a_rung_that_is_the_plan_has_its_speed() -> None:
    same: dict[str, Any] = {"outcome": "is the plan", "reason": "no change", "ratio": None}
    ladder = build_ladders(
        _record(_rung("slow", 0.5), _rung("last", 1.0, 0.5, **same), _rung("none", 1.0, **same))
    )[0]
    assert [step.factor and step.factor.value for step in ladder.steps] == [None, 2.0, None, None]
    assert [step.tokens_per_s for step in ladder.steps[1:]] == [PLAN_TOKENS_PER_S] * 3
    assert ladder.missing == ()
    # A rung that is run as the one before is no step.
    same = {"step": None, "reason": "as the rung before on this hardware"}
    record = _record(_rung("a", 0.5), _rung("b", 0.5, **same), _rung("c", 0.8, 0.5))
    (ladder,) = build_ladders(record)
    assert [step.factor is None for step in ladder.steps] == [True, True, False, False]
    assert text_of(render_ablation(record)).count(same["reason"]) == 1


def test_a_ladder_starts_where_something_was_measured() -> None:
    assert build_ladders(_record(_rung("a", None), _rung("b", None))) == ()
    assert build_ladders(make_ablation(plan_tokens_per_s=None)) == ()
    assert build_ladders(make_ablation(ladders=())) == ()
    ladder = build_ladders(_record(_rung("a", None), _rung("b", 0.4), _rung("c", 0.8, 0.4)))[0]
    assert ladder.start.label == "b" and ladder.whole.value == pytest.approx(2.5)
    assert ladder.steps[1].factor is None  # nothing before it to compare with


def test_faster_is_beyond_doubt_and_learns_as_well() -> None:
    assert is_faster(make_bar("x", "x", 1.09))
    assert is_faster(make_bar("x", "x", 1.09, is_sane=None))
    assert not is_faster(make_bar("x", "x", 1.03)), "its interval reaches below the bar"
    assert not is_faster(make_bar("x", "x", 1.09, is_sane=False))
    assert not is_faster(make_bar("x", "x", 1.09, metric="hours"))
    assert not is_faster(make_bar("x", "x", None))


NO_PRICE = {"usd_per_million_tokens": "no price is known for this hardware"}


@pytest.fixture(scope="module")
def page() -> str:
    return render_ablation(make_ablation())


def test_the_page_says_all_that_was_run_and_why_something_was_not(page: str) -> None:
    check_page_is_safe(page)
    assert len(page.encode()) < MAX_PAGE_BYTES / 4
    text = text_of(page)
    for words in (
        "3 pairs a variant", "20 timed, after 5 to warm up", "2,048 tokens", "64 sequences",
        "$2.49 an hour, as of 2026-11-01", "torch 2.13.0",
        f"Not measured: bf16 products (out of memory: {SHORT})", f"not measurable: {NO_FP8}",
        ONE_DISK, "1 as claimed, 2 more, 1 less, 2 no change, 1 not measurable.",
        "compile system E 1.2 to 2 times \u00d71.20 to 2.00 \u00d71.28 1.26 to 1.30",
    ):  # fmt: skip
        assert words in text
    for blank in (">None<", ">nan<", ">null<"):
        assert blank not in page
    order = ["Gradient checkpointing on", "Without compile", "TF32 off", "8 workers instead of 4"]
    changes = text[text.index("one change each") :]
    assert sorted(order, key=changes.index) == order


def test_the_verdict_says_what_the_plan_is_worth() -> None:
    found = judge_ablation(make_ablation())
    assert found.answer == "32.3 times as fast." and found.level == "mixed"
    for words in (
        "On NVIDIA H100 80GB HBM3 (made up) the plan trains 36.4k useful tokens a second",
        "\u00d732.3 (31.9 to 32.6)",
        "largest step is \u201cDocuments packed into rows\u201d (\u00d75.16)",
        "\u201cGradient checkpointing on\u201d costs most: \u00d70.740",
        "Faster than the plan here: \u201cMicro-batch 32 instead of 16\u201d (\u00d71.09)",
        "No measurable difference: \u201cTF32 off\u201d, \u201c8 workers instead of 4\u201d",
    ):
        assert words in found.sentence
    bars = (make_bar("a", "a", 1.5, of="l"), make_bar("b", "b", 1.2, of="l", before=1.5))
    found = judge_ablation(make_ablation(bars=bars, ladders=(("a", "b"),)))
    assert (found.level, found.answer) == ("bad", "Slower.")


def test_without_a_price_there_are_no_dollars() -> None:
    bars = tuple(replace(bar, usd_per_million_tokens=None) for bar in make_ablation().bars)
    record = make_ablation(
        price_usd_per_hour=None, price_as_of=None, plan_usd_per_million_tokens=None, bars=bars,
        unavailable=NO_PRICE,
    )  # fmt: skip
    text = text_of(render_ablation(record))
    assert make_ablation_tiles(record)[2].value == Missing(NO_PRICE["usd_per_million_tokens"])
    assert "$/M tokens: not measured, no price is known for this hardware." in text
    assert "$0" not in text and "$/M tokens tokens/s" not in text


def test_what_does_not_learn_as_the_plan_is_no_gain() -> None:
    bar = make_bar("x", "x", 1.2, is_sane=False, loss_differs=0.09, loss_bound=0.05)
    record = make_ablation(bars=(bar,), ladders=())
    page = render_ablation(record)
    assert "differs: +9.0 % (\u00b15.0 %)" in text_of(page)
    assert judge_ablation(record).answer == "No change is measurably faster."
    drawing = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "loss differs" in drawing and "var(--red)" in drawing
    assert "var(--orange)" not in drawing and not re.findall(r'"#[0-9a-f]{3,6}"', drawing)


def test_nothing_measured_is_said() -> None:
    bars = tuple(make_bar(name, name, None, of="l") for name in "abc")
    record = make_ablation(bars=bars, ladders=(("a", "b", "c"),), plan_tokens_per_s=None, claims=())
    found = judge_ablation(record)
    assert (found.level, found.answer) == ("bad", "Nothing was measured.")
    assert SHORT in found.sentence
    text = text_of(render_ablation(record))
    assert "No rung was measured." in text and "hold no claims" in text
    assert in_a_line(record) == "Nothing was measured"


def test_hostile_names_are_escaped_and_whole() -> None:
    plain = to_json(make_ablation(notes=("x",), unavailable={"a": "b"}))
    kept = {"outcome", "verdict", "metric", "of", "name", "ladders", "method"}
    record = from_json(AblationRecord, hostile(plain, kept, {"unavailable", "versions"}))
    page = render_ablation(record)
    check_page_is_safe(page)
    assert page.count("</style>") == 1 and "{{ 7 * 7 }}" in page


def test_a_waterfall_starts_at_zero_and_names_every_rung() -> None:
    ladder = build_ladders(make_ablation())[0]
    chart = charts_waterfall.waterfall_chart(ladder)
    for drawing in (chart.wide, chart.narrow):
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
        assert {"0 tokens/s", "20k", "out of memory", "the plan"} <= set(texts)
        assert len([text for text in texts if text.startswith("\u00d75.16")]) == 2  # with its rim
    assert "\u00d75.16 (5.04 to 5.28) \u00b7 29.5k" in chart.wide
    assert "\u00d75.16 \u00b7 29.5k" in chart.narrow
    # Coordinates are rounded, and colors replaced; a name that looks like one stays.
    name = 'lr 0.123456 role="x" "#2d6cb6"'
    drawn = charts_waterfall.changes_chart((make_bar("x", name, 0.9),))
    assert drawn is not None and f">{name}<" in drawn.wide


def test_a_ladder_that_is_the_plan_says_nothing_of_it() -> None:
    same = {"outcome": "is the plan", "reason": "nothing would change", "ratio": None}
    rungs = [make_bar(name, name, 1.0, of="l", **same) for name in ("a", "b")]
    faster = make_bar("x", "Bigger batches", 1.2)
    record = make_ablation(bars=(*rungs, faster), ladders=(("a", "b"),), claims=())
    found, line = judge_ablation(record), in_a_line(record)
    assert (found.level, found.answer) == ("mixed", "One change is faster.")
    assert found.sentence.startswith("Faster than the plan here")
    assert line.startswith("One change is faster; faster than the plan") and "beside" not in line
    assert make_ablation_tiles(record)[1].value == Missing("every rung is the plan")


PRICE = 2.49


def _with(inputs: ReportInputs, **changes: Any) -> ReportInputs:
    record = make_ablation(**{"gpu_name": inputs.monitor.gpu_name, **changes})
    return replace(inputs, ablation=record)


def _report(inputs: ReportInputs) -> Report:
    return build_report(inputs, PROVENANCE)


def _switch_costs(report: Report) -> Finding | None:
    return next(find_slow_settings(report), None)


def test_the_report_has_the_whole_record_and_its_page_a_section(
    short_inputs: ReportInputs, gpu_report: Report, gpu_page: str
) -> None:
    inputs = _with(short_inputs)
    report = _report(inputs)
    check_report(report, inputs)
    assert report.comparison == (inputs.ablation,)
    shown = section(render_page(report, inputs), "comparison")
    assert "32.3 times as fast." in shown and shown.count("<figure>") == 1
    assert 'href="ablation.html"' in shown and "as claimed" in shown
    assert gpu_report.comparison == () and "ablation.html" not in gpu_page
    shown = section(gpu_page, "comparison")
    assert "--config ablate=true" in shown and "results/expert-sql/ablation.json" in shown


def test_the_terminal_has_a_line(gpu_inputs: ReportInputs, gpu_report: Report) -> None:
    rows = dict(summary_rows(_report(_with(gpu_inputs)), html_path=Path("x")))
    assert rows["ablation"].startswith("plan \u00d732.3 (31.9 to 32.6) beside \u201cNaive loop")
    assert "claims: 1 as claimed" in rows["ablation"]
    assert "ablation" not in dict(summary_rows(gpu_report, html_path=Path("x")))


def test_a_switch_that_slows_the_plan_is_found_and_priced(gpu_inputs: ReportInputs) -> None:
    report = _report(_with(gpu_inputs))
    found = _switch_costs(report)
    assert found is not None
    assert "Micro-batch 32" in found.evidence and "1.08 to 1.10" in found.evidence
    saved_s = report.time.train_s * (1 - 1 / 1.09)
    assert found.worth_usd == pytest.approx(PRICE * saved_s / 3600)
    several = _switch_costs(changed(report, {"training_parameters.world_size": 2}))
    assert several is not None
    assert (several.worth_usd, several.worth_reason) == (None, ONE_PROCESS)


def test_only_the_largest_switch_is_priced(gpu_inputs: ReportInputs) -> None:
    bars = tuple(make_bar(f"x{i}", f"change {i}", 1.1 + i / 10) for i in range(3))
    found = _switch_costs(_report(_with(gpu_inputs, bars=bars, ladders=())))
    assert found is not None and "with \u201cchange 2\u201d" in found.evidence
    assert "so are \u201cchange 1\u201d, \u201cchange 0\u201d" in found.evidence
    odd = make_bar("x", "x", 1.2, is_sane=False)
    assert _switch_costs(_report(_with(gpu_inputs, bars=(odd,), ladders=()))) is None


def test_recomputation_is_not_priced_twice(gpu_inputs: ReportInputs) -> None:
    report = _report(_with(gpu_inputs))
    report = changed(report, {
        "training_parameters.gradient_checkpointing": True,
        "plan.without_checkpointing_peak_bytes": 1,
        "model.flops_per_token_hardware": 1.05 * report.model.flops_per_token_model,
    })  # fmt: skip
    found = _switch_costs(report)
    saved_s = report.time.train_s * (1 - 1 / 1.09) - recomputation_seconds(report)
    assert found is not None and found.worth_usd is not None and saved_s > 0
    assert found.worth_usd == pytest.approx(PRICE * saved_s / 3600)
    # Where recomputation costs more than the change saves, nothing is left to price.
    twice = {"model.flops_per_token_hardware": 2 * report.model.flops_per_token_model}
    found = _switch_costs(changed(report, twice))
    assert found is not None and found.worth_usd == 0


def _worth(inputs: ReportInputs, here: Any, machine: str | None, **changed: Any) -> Any:
    inputs = replace(_with(inputs, machine=machine, **changed), preflight={"machine": here})
    found = _switch_costs(_report(inputs))
    assert found is not None
    return OTHER_HARDWARE if found.worth_reason == OTHER_HARDWARE else found.worth_usd


def test_other_hardware_has_no_price_here(gpu_inputs: ReportInputs) -> None:
    here = {"n_cpus_usable": 8, "cpu_model": "Made-up 9000"}
    assert _worth(gpu_inputs, here, "8 processors, Made-up 9000") > 0
    assert _worth(gpu_inputs, here, None, gpu_name="another") == OTHER_HARDWARE
    assert _worth(gpu_inputs, here, "4 processors, Made-up 9000") == OTHER_HARDWARE
    assert _worth(gpu_inputs, here, "8 processors, Another") == OTHER_HARDWARE
    assert _worth(gpu_inputs, {**here, "cpu_model": None}, "8 processors, unnamed") > 0
    # Nothing is known of one of the two.
    assert _worth(gpu_inputs, here, None) > 0 and _worth(gpu_inputs, None, "8 processors, X") > 0
