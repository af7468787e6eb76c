"""The ablation: ladders, its page, and its section, finding and line in the report."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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
from msgspec.structs import fields, replace
from report_reading import check_page_is_safe

from expertflow.core.errors import DataError
from expertflow.core.records import from_json, to_json
from expertflow.hardware.probe import probe_machine
from expertflow.report.ablation_facts import Ladder, changes, is_faster, ladders
from expertflow.report.ablation_page import (
    claim_lines,
    in_a_line,
    lines,
    render_ablation,
    tiles,
    verdict,
)
from expertflow.report.build import build_report
from expertflow.report.charts import waterfall as charts_waterfall
from expertflow.report.check import check_report
from expertflow.report.findings.hardware import (
    ONE_PROCESS,
    OTHER_HARDWARE,
    recomputed_s,
    switch_costs,
)
from expertflow.report.inputs import ReportInputs
from expertflow.report.page import MAX_PAGE_BYTES, render_page
from expertflow.report.records import Finding
from expertflow.report.summary import summary_rows
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


HOSTILE = "<script>alert(1)</script>\" onload='x' {{ 7 * 7 }} </style></svg> 0.123456 \u202e"

NO_PRICE = {"usd_per_million_tokens": "no price is known for this hardware"}


def _text(page: str) -> str:
    plain = re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]+>", " ", page, flags=re.DOTALL)
    return " ".join(plain.replace("\u00a0", " ").split())


@pytest.fixture(scope="module")
def page() -> str:
    return render_ablation(make_ablation())


def test_page_is_one_small_file_without_network_or_script(page: str) -> None:
    check_page_is_safe(page)
    assert len(page.encode()) < MAX_PAGE_BYTES / 4
    assert page == render_ablation(make_ablation())


def test_colours_come_from_the_page(page: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert set(re.findall(r'"#[0-9a-f]{3,6}"', drawings)) == set()
    assert {"var(--text)", "var(--red)"} >= set(re.findall(r"var\(--(?:text|red)\)", drawings))
    assert "var(--green)" in drawings and "var(--blue)" in drawings


def test_the_verdict_says_what_the_plan_is_worth() -> None:
    found = verdict(make_ablation())
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


def test_figures_of_the_tiles() -> None:
    assert [tile.value.text for tile in tiles(make_ablation())] == [
        "36.4k", "\u00d732.3", "$0.019", "7",
    ]  # fmt: skip
    assert tiles(make_ablation())[2].note == "first rung: $0.61"


def test_blanks_are_named_with_their_reasons(page: str) -> None:
    text = _text(page)
    assert f"Not measured: bf16 products (out of memory: {SHORT})" in text
    assert f"not measurable: {NO_FP8}" in text and ONE_DISK in text
    for blank in (">None<", ">nan<", ">null<"):
        assert blank not in page


def test_every_claim_has_who_said_it_and_what_came(page: str) -> None:
    text = _text(page)
    assert "1 as claimed, 2 more, 1 less, 2 no change, 1 not measurable." in text
    assert "compile system E 1.2 to 2 times \u00d71.20 to 2.00 \u00d71.28 1.26 to 1.30" in text
    tones = {line["claim"]: line["tone"] for line in claim_lines(make_ablation())}
    assert tones["compile"] == "pass" and tones["half the saves"] == "fail"
    assert tones["8 workers against 4"] == "na"  # nothing was said in figures


def test_without_a_price_there_are_no_dollars() -> None:
    bars = tuple(replace(bar, usd_per_million_tokens=None) for bar in make_ablation().bars)
    record = make_ablation(
        price_usd_per_hour=None, price_as_of=None, plan_usd_per_million_tokens=None, bars=bars,
        unavailable=NO_PRICE,
    )  # fmt: skip
    text = _text(render_ablation(record))
    assert tiles(record)[2].value.reason == NO_PRICE["usd_per_million_tokens"]
    assert "$/M tokens: not measured, no price is known for this hardware." in text
    assert "$0" not in text and "$/M tokens tokens/s" not in text


def test_a_variant_that_failed_once_is_no_figure() -> None:
    bad = make_bar("x", "Broken kernel", None, outcome="failed", reason="loss is NaN in repeat 2")
    page = render_ablation(make_ablation(bars=(bad,), ladders=()))
    assert "failed: loss is NaN in repeat 2" in _text(page)
    assert "No ladder is in the lists that were run" in page and "<figure>" not in page


def test_nothing_measured_is_said() -> None:
    bars = tuple(make_bar(name, name, None, of="l") for name in "abc")
    record = make_ablation(bars=bars, ladders=(("a", "b", "c"),), plan_tokens_per_s=None, claims=())
    found = verdict(record)
    assert (found.level, found.answer) == ("bad", "Nothing was measured.")
    assert SHORT in found.sentence
    text = _text(render_ablation(record))
    assert "No rung was measured." in text and "hold no claims" in text
    assert in_a_line(record) == "Nothing was measured"


def test_a_plan_slower_than_its_ladder_is_bad() -> None:
    bars = (make_bar("a", "a", 1.5, of="l"), make_bar("b", "b", 1.2, of="l", before=1.5))
    found = verdict(make_ablation(bars=bars, ladders=(("a", "b"),)))
    assert (found.level, found.answer) == ("bad", "Slower.")


def test_a_loss_that_differs_is_marked() -> None:
    bar = make_bar("x", "x", 1.2, is_sane=False, loss_differs=0.09, loss_bound=0.05)
    record = make_ablation(bars=(bar,), ladders=())
    text = _text(render_ablation(record))
    assert "differs: +9.0 % (\u00b15.0 %)" in text
    assert verdict(record).answer == "No change is measurably faster."


def test_all_that_was_run_is_on_the_page(page: str) -> None:
    text = _text(page)
    for words in ("3 pairs a variant", "20 timed, after 5 to warm up", "2,048 tokens",
                  "64 sequences", "$2.49 an hour, as of 2026-11-01", "torch 2.13.0"):  # fmt: skip
        assert words in text


def _hostile(value: Any, key: str = "") -> Any:
    kept = {"outcome", "verdict", "metric", "of", "name", "ladders", "method"}
    if isinstance(value, str):
        return value if key in kept else HOSTILE
    if isinstance(value, tuple):
        return tuple(_hostile(item, key) for item in value)
    if isinstance(value, dict):
        return dict.fromkeys([HOSTILE], HOSTILE)
    if hasattr(value, "__struct_fields__"):
        return replace(
            value, **{f.name: _hostile(getattr(value, f.name), f.name) for f in fields(value)}
        )
    return value


def test_hostile_names_are_escaped_and_whole() -> None:
    record: AblationRecord = _hostile(make_ablation(notes=("x",), unavailable={"a": "b"}))
    page = render_ablation(record)
    check_page_is_safe(page)
    assert page.count("</style>") == 1 and "{{ 7 * 7 }}" in page


def test_names_in_drawings_keep_their_digits() -> None:
    """Coordinates are rounded, and colours replaced; a name that looks like one stays."""
    name = 'lr 0.123456 role="x" "#2d6cb6"'
    chart = charts_waterfall.changes_chart((make_bar("x", name, 0.9),))
    assert chart is not None and f">{name}<" in chart.wide


def test_a_waterfall_starts_at_zero_and_names_every_rung() -> None:
    ladder = ladders(make_ablation())[0]
    chart = charts_waterfall.waterfall_chart(ladder)
    for drawing in (chart.wide, chart.narrow):
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
        assert {"0 tokens/s", "20k", "out of memory", "the plan"} <= set(texts)
        assert len([text for text in texts if text.startswith("\u00d75.16")]) == 2  # with its rim
    assert "\u00d75.16 (5.04 to 5.28) \u00b7 29.5k" in chart.wide
    assert "\u00d75.16 \u00b7 29.5k" in chart.narrow


def test_an_interval_without_bounds_leaves_room_for_the_rest() -> None:
    wide = replace(estimate(0.9), low=0.001, high=900.0, least=0.8, most=1.0)
    bars = (make_bar("a", "a", 0.9, ratio=wide), make_bar("b", "b", 1.1))
    chart = charts_waterfall.changes_chart(changes(make_ablation(bars=bars, ladders=())))
    assert chart is not None
    ticks = re.findall(r">\u00d7([\d.]+)(?: the plan)?<", chart.narrow)
    assert all(0.4 < float(tick) < 2.5 for tick in ticks)


def test_a_ladder_that_is_the_plan_says_nothing_of_it() -> None:
    same = {"outcome": "is the plan", "reason": "nothing would change", "ratio": None}
    rungs = [make_bar(name, name, 1.0, of="l", **same) for name in ("a", "b")]
    faster = make_bar("x", "Bigger batches", 1.2)
    record = make_ablation(bars=(*rungs, faster), ladders=(("a", "b"),), claims=())
    found = verdict(record)
    assert (found.level, found.answer) == ("mixed", "One change is faster.")
    assert found.sentence.startswith("Faster than the plan here")
    line = in_a_line(record)
    assert line.startswith("One change is faster; faster than the plan") and "beside" not in line
    assert tiles(record)[1].value.reason == "every rung is the plan"
    assert "One change is faster." in render_ablation(record)


def test_what_does_not_learn_as_the_plan_is_drawn_as_no_gain() -> None:
    odd = make_bar("x", "Wrong batches", 1.2, is_sane=False)
    page = render_ablation(make_ablation(bars=(odd,), ladders=()))
    drawing = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "loss differs" in drawing and "var(--red)" in drawing
    assert "var(--orange)" not in drawing


Report = dict[str, Any]


def _with(inputs: ReportInputs, **changed: Any) -> ReportInputs:
    name = inputs.monitor.gpu_name
    return replace(inputs, ablation=make_ablation(gpu_name=name, **changed))


def _report(inputs: ReportInputs) -> Report:
    return build_report(inputs, PROVENANCE)


def _switch_costs(report: Report) -> Finding | None:
    return next(switch_costs(report), None)


def test_the_whole_record_is_in_the_report(gpu_inputs: ReportInputs) -> None:
    inputs = _with(gpu_inputs)
    report = _report(inputs)
    check_report(report, inputs)
    assert from_json(AblationRecord, report["comparison"][0]) == inputs.ablation


def test_the_page_shows_it_and_leads_to_all_of_it(gpu_inputs: ReportInputs) -> None:
    inputs = _with(gpu_inputs)
    page = render_page(_report(inputs), inputs)
    section = page[page.index('<section id="comparison"') :].split("</section>")[0]
    assert "32.3 times as fast." in section and section.count("<figure>") == 1
    assert 'href="ablation.html"' in section and "as claimed" in section
    assert page.index('id="data"') < page.index('id="comparison"') < page.index('id="findings"')


def test_without_one_the_page_says_how_to_get_it(gpu_inputs: ReportInputs) -> None:
    report = _report(gpu_inputs)
    page = render_page(report, gpu_inputs)
    assert report["comparison"] == []
    assert "--config ablate=true" in page and "results/expert-sql/ablation.json" in page
    assert "ablation.html" not in page


def test_the_terminal_has_a_line(gpu_inputs: ReportInputs) -> None:
    rows = dict(summary_rows(_report(_with(gpu_inputs)), html_path=Path("x")))
    assert rows["ablation"].startswith("plan \u00d732.3 (31.9 to 32.6) beside \u201cNaive loop")
    assert "claims: 1 as claimed" in rows["ablation"]
    assert "ablation" not in dict(summary_rows(_report(gpu_inputs), html_path=Path("x")))


def test_a_switch_that_slows_the_plan_is_found_and_priced(gpu_inputs: ReportInputs) -> None:
    report = _report(_with(gpu_inputs))
    found = {item["code"]: item for item in report["findings"]}["switch-costs"]
    assert "Micro-batch 32" in found["evidence"] and "1.08 to 1.10" in found["evidence"]
    saved_s = report["time"]["train_s"] * (1 - 1 / 1.09)
    worth = report["cost"]["usd_per_hour"] * saved_s / 3600
    assert found["worth_usd"] == pytest.approx(worth)


def test_only_the_largest_switch_is_priced(gpu_inputs: ReportInputs) -> None:
    bars = tuple(make_bar(f"x{i}", f"change {i}", 1.1 + i / 10) for i in range(3))
    found = _switch_costs(_report(_with(gpu_inputs, bars=bars, ladders=())))
    assert found is not None and "with \u201cchange 2\u201d" in found.evidence
    assert "so are \u201cchange 1\u201d, \u201cchange 0\u201d" in found.evidence


def test_recomputation_is_not_priced_twice(gpu_inputs: ReportInputs) -> None:
    report = _report(_with(gpu_inputs))
    report["training_parameters"]["gradient_checkpointing"] = True
    report["plan"]["without_checkpointing_peak_bytes"] = 1
    report["model"]["flops_per_token_hardware"] = 1.05 * report["model"]["flops_per_token_model"]
    found = _switch_costs(report)
    saved_s = report["time"]["train_s"] * (1 - 1 / 1.09) - recomputed_s(report)
    assert found is not None and found.worth_usd is not None and saved_s > 0
    assert found.worth_usd == pytest.approx(report["cost"]["usd_per_hour"] * saved_s / 3600)


def test_other_hardware_has_no_price_here(gpu_inputs: ReportInputs) -> None:
    found = _switch_costs(_report(replace(gpu_inputs, ablation=make_ablation(gpu_name="another"))))
    assert found is not None and (found.worth_usd, found.worth_reason) == (None, OTHER_HARDWARE)


def _worth(inputs: ReportInputs, facts: dict[str, Any] | None, machine: str | None) -> Any:
    inputs = replace(_with(inputs, machine=machine), preflight={"machine": facts})
    found = _switch_costs(_report(inputs))
    assert found is not None
    return OTHER_HARDWARE if found.worth_reason == OTHER_HARDWARE else found.worth_usd


def test_other_processors_have_no_price_here(gpu_inputs: ReportInputs) -> None:
    here = {"n_cpus_usable": 8, "cpu_model": "Made-up 9000"}
    assert _worth(gpu_inputs, here, "8 processors, Made-up 9000") > 0
    assert _worth(gpu_inputs, here, "4 processors, Made-up 9000") == OTHER_HARDWARE
    assert _worth(gpu_inputs, here, "8 processors, Another") == OTHER_HARDWARE
    assert _worth(gpu_inputs, {**here, "cpu_model": None}, "8 processors, unnamed") > 0
    # Nothing is known of one of the two.
    assert _worth(gpu_inputs, here, None) > 0 and _worth(gpu_inputs, None, "8 processors, X") > 0


def test_an_ablation_names_its_machine_as_the_rule_expects(
    gpu_inputs: ReportInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expertflow.studies import ablate_variant as module

    monkeypatch.setattr(module, "read_record", lambda *_: SimpleNamespace(hardware="x"))
    monkeypatch.setattr(module, "sha256_file", lambda _: "")
    spec = SimpleNamespace(variant=None)
    job = SimpleNamespace(expert="e", spec=spec, plan=None)
    machine = module._blank(cast(module.VariantJob, job)).machine
    assert _worth(gpu_inputs, to_json(probe_machine(table=[])), machine) > 0


def test_one_process_does_not_price_several(gpu_inputs: ReportInputs) -> None:
    report = _report(_with(gpu_inputs))
    report["training_parameters"]["world_size"] = 2
    found = _switch_costs(report)
    assert found is not None and (found.worth_usd, found.worth_reason) == (None, ONE_PROCESS)


def test_no_finding_without_a_faster_change(gpu_inputs: ReportInputs) -> None:
    odd = make_bar("x", "x", 1.2, is_sane=False)
    near = make_bar("y", "y", 1.04, ratio=estimate(1.04, 0.03))
    assert _switch_costs(_report(_with(gpu_inputs, bars=(odd, near), ladders=()))) is None
    assert _switch_costs(_report(gpu_inputs)) is None
