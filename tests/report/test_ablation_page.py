"""ablation.html: what it says, what it says of blanks, and that it is one small, safe file."""

import re
from typing import Any

import pytest
from made_up_ablation import NO_FP8, ONE_DISK, SHORT, estimate, make_ablation, make_bar
from msgspec.structs import fields, replace
from report_reading import check_page_is_safe

from expertflow.report.ablation_facts import changes, ladders
from expertflow.report.ablation_page import (
    claim_lines,
    in_a_line,
    render_ablation,
    tiles,
    verdict,
)
from expertflow.report.charts import waterfall as charts_waterfall
from expertflow.report.page import MAX_PAGE_BYTES
from expertflow.studies.records import AblationRecord

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


def test_no_single_changes() -> None:
    record = make_ablation(bars=make_ablation().bars[:7])
    assert "No single change was measured." in render_ablation(record)
    assert verdict(record).level == "good" and "Faster than" not in verdict(record).sentence


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
