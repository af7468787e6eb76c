"""An ablation: textbook intervals, odd losses, hours of saves, verdicts on claims, bars."""

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.student import student_quantile
from expertflow.plan.records import TrainPlan
from expertflow.staging.records import Staged
from expertflow.studies import compare_trials
from expertflow.studies.ablation import join_ablation, judge_claim
from expertflow.studies.compare_trials import (
    compare_losses,
    estimate_ratio,
    hours_ratios,
    read_speed_ratios,
)
from expertflow.studies.records import (
    IS_ONE,
    AblationRecord,
    AblationSpec,
    Bar,
    ClaimedRatio,
    ClaimVerdict,
    Variant,
    VariantRecord,
)
from expertflow.studies.variants import NotMeasurableError
from expertflow.train.records import TrialResult


def timing(tokens_per_s: float) -> TrialResult:
    return TrialResult(outcome="measured", n_tokens=1000, timed_s=1000 / tokens_per_s, device="cpu")


def variant(name: str, **changes: Any) -> Variant:
    return Variant(**{"name": name, "label": name, "rows": "packed", "training": {}, **changes})


def measured(name: str, *ratios: float, plan: float = 100.0, **changes: Any) -> VariantRecord:
    """Return a variant with these ratios to a plan of ``plan`` tokens per second."""
    settings: dict[str, Any] = {
        "expert": "e", "variant": variant(name), "outcome": "measured", "reason": None,
        "plan_sha256": "p",
        "timings": tuple(timing(plan * r) for r in ratios),
        "plan_timings": tuple(timing(plan) for _ in ratios),
        "ratio": estimate_ratio(ratios) if ratios else None, "loss_differs": 0.0, "is_sane": True,
        "machine": "2 processors", "versions": {"torch": "2"},
    }  # fmt: skip
    return VariantRecord(**{**settings, **changes})


def plain(name: str, reason: str = "", outcome: str = "is the plan") -> VariantRecord:
    return measured(name, outcome=outcome, reason=reason)


def test_an_interval_uses_logarithms_and_the_tables_quantiles() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 9: 2.2622, 10: 2.2281, 49: 2.0096}
    assert {n: student_quantile(n) for n in table} == pytest.approx(table, abs=1e-4)
    # Logarithms -0.1, 0, 0.1: mean 0, deviation 0.1, half-width 4.3027 * 0.1 / sqrt(3).
    found = estimate_ratio([math.exp(-0.1), 1.0, math.exp(0.1)])
    assert found.value == pytest.approx(1)
    assert math.log(found.high) == pytest.approx(4.3027 * 0.1 / math.sqrt(3), abs=1e-5)
    assert found.low == pytest.approx(1 / found.high)
    assert (found.least, found.most) == (math.exp(-0.1), math.exp(0.1))


def test_quotients_add_half_widths_in_squares() -> None:
    of, to = estimate_ratio([1.9, 2.0, 2.1]), estimate_ratio([0.5, 0.52, 0.48])
    found = of.divide_by(to)
    assert found.value == pytest.approx(of.value / to.value)
    squares = [math.log(e.high / e.value) ** 2 for e in (of, to)]
    assert math.log(found.high / found.value) ** 2 == pytest.approx(sum(squares))
    assert found.least == pytest.approx(1.9 / 0.52) and found.most == pytest.approx(2.1 / 0.48)
    assert of.divide_by(IS_ONE).low == pytest.approx(of.low)


def verdict(of: str, to: str, *records: VariantRecord, **bounds: float) -> ClaimVerdict:
    claim = ClaimedRatio(claim="c", by="A", said="s", of=of, to=to, **bounds)
    return judge_claim(claim, {record.variant.name: record for record in records})


TWICE = measured("a", 1.95, 2.0, 2.05)
ALIKE = [measured(name, 1.95, 2.0, 2.05, settings_sha256="s") for name in "ab"]
SAID = {"low": 1.2, "high": 2.0}
HOURS = "600 steps of 1 s and 28 saves of 2 s"
HALF = variant("a", metric="hours", saves=0.5)


def test_a_verdict_follows_from_the_interval_and_has_its_reason() -> None:
    for records, bounds, expected, reason in (
        ([TWICE], SAID, "as claimed", "the interval extends beyond the claim"),
        ([TWICE], {"low": 8.0, "high": 8.0}, "less", None),
        ([TWICE], {"low": 1.05, "high": 1.1}, "more", None),
        ([TWICE], {"low": 5.0}, "less", None),
        ([TWICE], {}, "measured", None),
        ([measured("a", 2.0, 2.2, 2.4)], SAID, "not decided", "overlaps the claim"),
        ([measured("a", 0.9, 1.0, 1.1)], SAID, "no change", "also contains the claim"),
        ([measured("a", 0.5, 0.51, 0.49)], SAID, "less", None),
        # A claim of no change is confirmed by none.
        ([measured("a", 0.99, 1.0, 1.01)], {"low": 0.95, "high": 1.05}, "as claimed", None),
        ([measured("a", 1.5, 1.51, 1.52)], SAID, "as claimed", None),
        ([measured("a", 1.012, 1.012, 1.0121, variant=HALF, reason=HOURS)], SAID, "less", HOURS),
        # Variants that run the same are not compared; one that equals the plan represents it.
        (ALIKE, {}, "not measurable", "a and b are the same here"),
        ([TWICE, plain("b")], SAID, "as claimed", "b is the plan here"),
        ([measured("a", 1.1, 1.1, 1.2, variant=HALF), measured("b", 1.9, 2.0, 2.1)], {},
         "not measurable", "a and b do not measure the same thing"),
        # A claim without an answer has a reason.
        ([plain("a", "TF32 is of cards"), plain("b")], {}, "not measurable",
         "the same here: TF32 is of cards"),
        ([TWICE, plain("b", "no compiler", "not measurable")], {}, "not measurable",
         "b: not measurable, no compiler"),
    ):  # fmt: skip
        found = verdict("a", "b" if len(records) > 1 else "plan", *records, **bounds)
        assert found.verdict == expected
        assert found.reason is None if reason is None else reason in (found.reason or "")
        assert found.measured == (None if expected == "not measurable" else records[0].ratio)
        assert found.metric == records[0].variant.metric


def test_the_plan_against_a_slower_variant_turns_the_ratio() -> None:
    found = verdict("plan", "slow", measured("slow", 0.19, 0.2, 0.21), low=5.0)
    assert found.measured is not None
    assert found.measured.value == pytest.approx(5, rel=0.01) and found.verdict == "as claimed"
    assert found.measured.least == pytest.approx(1 / 0.21)


def test_a_claim_that_no_variant_answers_has_a_reason() -> None:
    claim = ClaimedRatio(claim="c", by="A", said="2-3x", low=2.0, high=3.0, unmeasured="one here")
    found = judge_claim(claim, {})
    assert (found.verdict, found.measured, found.reason) == ("not measurable", None, "one here")


def spec_of(*variants: Variant) -> AblationSpec:
    return AblationSpec(
        preset="demo", variants=variants, claims=(), n_repeats=3, n_warmup_steps=5,
        n_timed_steps=20, max_timed_s=60.0,
    )  # fmt: skip


def joined(
    plan: TrainPlan, *records: VariantRecord, price: float | None = None, **changes: Any
) -> AblationRecord:
    plan = replace(plan, cost=replace(plan.cost, price_usd_per_hour=price), **changes)
    spec = spec_of(*(record.variant for record in records))
    return join_ablation(spec, plan=plan, model="m", records=records)


def ladder(plan: TrainPlan, *records: VariantRecord) -> AblationRecord:
    """Join the rungs of one ladder; the last one is the plan."""
    rungs = [
        replace(record, variant=variant(record.variant.name, of="l", rung=i))
        for i, record in enumerate((*records, plain("end")))
    ]
    return joined(plan, *rungs)


NAIVE, MIDDLE = measured("naive", 0.099, 0.1, 0.101), measured("middle", 0.39, 0.4, 0.41)


def test_each_rung_is_worth_its_ratio_to_the_one_before(base: TrainPlan) -> None:
    record = ladder(replace(base, n_warmup_steps=60), NAIVE, MIDDLE)
    assert record.n_warmup_steps == 5
    first, second, last = record.bars
    assert record.ladders == (("naive", "middle", "end"),)
    assert first.step is None
    assert second.step and second.step.value == pytest.approx(4, rel=0.01)
    assert last.step and last.step.value == pytest.approx(2.5, rel=0.01)
    assert last.ratio is None and last.tokens_per_s == record.plan_tokens_per_s == 100
    halves = [measured(name, 0.5, 0.5, 0.5, plan=n) for name, n in (("naive", 80), ("middle", 120))]
    record = ladder(base, *halves)
    assert record.plan_tokens_per_s == 100
    assert [bar.tokens_per_s for bar in record.bars] == pytest.approx([50, 50, 100])


def test_a_rung_that_runs_like_the_previous_one_is_worth_nothing(base: TrainPlan) -> None:
    middle = measured("middle", 0.5, 0.6, 0.7, settings_sha256="a", reason="not compiled")

    def bars(settings_sha256: str) -> tuple[Bar, ...]:
        naive = measured("naive", 0.39, 0.4, 0.41, settings_sha256=settings_sha256)
        return ladder(base, naive, middle).bars

    first, second, last = bars("a")
    assert second.step is None and second.ratio == first.ratio != middle.ratio
    assert second.reason == "same as the previous rung on this hardware; not compiled"
    assert last.step and last.step.value == pytest.approx(2.5, rel=0.01)
    assert bars("b")[1].step is not None


def test_dollars_need_a_price(base: TrainPlan) -> None:
    half = measured("v", 0.5, 0.5, 0.5)
    free = joined(base, half)
    assert free.plan_usd_per_million_tokens is free.bars[0].usd_per_million_tokens is None
    assert "price_usd_per_hour" in free.unavailable["usd_per_million_tokens"]
    paid = joined(base, half, price=3.6)
    # 100 tokens/s are 10,000 s per million, at 0.001 dollars per second.
    assert paid.plan_usd_per_million_tokens == pytest.approx(10)
    assert paid.bars[0].usd_per_million_tokens == pytest.approx(20)
    assert not paid.unavailable


def test_unmeasured_variants_keep_their_reason(base: TrainPlan) -> None:
    bar, *others = ladder(base, plain("naive", "no memory", "out of memory"), MIDDLE).bars
    assert (bar.outcome, bar.reason, bar.ratio) == ("out of memory", "no memory", None)
    assert bar.tokens_per_s is bar.peak_memory_bytes is bar.padding_fraction is None
    assert [other.step is None for other in others] == [True, False]
    record = joined(base, measured("v", 2, 2, 2.1), price=1.0, world_size=2)
    assert any("2 processes; all runs here use one" in note for note in record.notes)
    # The price may be for one card or for two.
    assert record.price_usd_per_hour is record.plan_usd_per_million_tokens is None
    assert "for 2 processes" in record.unavailable["usd_per_million_tokens"]


def test_records_of_another_plan_or_none_are_rejected(base: TrainPlan) -> None:
    one, other = measured("a", 1, 1, 1), measured("b", 1, 1, 1, plan_sha256="q")
    with pytest.raises(DataError, match="'b' has no record"):
        join_ablation(spec_of(one.variant, other.variant), plan=base, model="m", records=[one])
    with pytest.raises(DataError, match="2 different plans"):
        joined(base, one, other)


def result(losses: list[float], *, tokens_per_step: float = 100, **changes: Any) -> TrialResult:
    n = len(losses) - 2
    timed = {"n_timed_steps": n, "n_tokens": round(n * tokens_per_step), "timed_s": 1.0 * n}
    return TrialResult(**{"outcome": "measured", "losses": tuple(losses), **timed, **changes})


def falling(n: int = 14, scale: float = 1.0) -> list[float]:
    return [scale * (6 - 3 * i / n) for i in range(n)]


WORKERS = {"loader": "workers", "dataloader_num_workers": 4}
SDPA = {"attention": "sdpa"}


def test_losses_differ_as_explained(base: TrainPlan) -> None:
    for losses, changes, other_rows, bound, is_sane in (
        # The same rows agree within rounding.
        (falling(scale=1.005), WORKERS, False, 0.01, True),
        (falling(scale=1.02), WORKERS, False, 0.01, False),
        (falling(scale=0.98), WORKERS, False, 0.01, False),
        (falling(scale=1.02), {"precision": "bf16"}, False, 0.05, True),
        # The variant only had time for 8 of 14 steps, so the plan's later ones are ignored.
        (falling()[:8], SDPA, False, 0.01, True),
        ([*falling()[:13], math.nan], SDPA, False, 0.01, False),
        # Another order has a wider bound.
        (falling(scale=1.08), {}, True, 0.10, True),
        (falling(scale=0.8), {}, True, 0.10, False),
    ):
        plan, pair = replace(base, **changes), (result(losses), result(falling()))
        found = compare_losses([pair], base=base, plan=plan, other_rows=other_rows)
        assert (found["loss_bound"], found["is_sane"]) == (bound, is_sane)
        expected = losses[0] / 6 - 1 if math.isfinite(losses[-1]) else None
        assert found["loss_differs"] == pytest.approx(expected)


def test_other_updates_may_learn_more_but_not_less(base: TrainPlan) -> None:
    # Four small steps for one of the plan's: the same tokens.
    plan = replace(base, batch_size=1, global_batch_sequences=1)
    for scale, sane in ((1.0, True), (0.6, True), (1.3, False)):
        pair = result(falling(56, scale), tokens_per_step=25), result(falling())
        found = compare_losses([pair], base=base, plan=plan, other_rows=False)
        assert (found["loss_bound"], found["is_sane"]) == (0.25, sane)


def timed(step_s: float, save_s: float) -> list[TrialResult]:
    return [result(falling(12), timed_s=10 * step_s, save_s=save_s)]


def test_half_the_saves_of_system_d_gain_a_little(base: TrainPlan) -> None:
    # 28 saves of 2 min in 38 h, of which 37.07 h are steps: half of them are 1.2 %.
    plan = replace(base, n_steps=28_000, save_steps=1000, save_every_minutes=1e9)
    ratios, how = hours_ratios(plan, timed((38 * 3600 - 28 * 120) / 28_000, 120), saves=0.5)
    assert ratios == pytest.approx([38 / (38 - 14 / 30)])
    assert "28000 steps of" in how and "28 saves of 120 s, against 14;" in how
    # A save restarts the clock: every ninth of 100 steps of 72 s, and every thirtieth.
    often = replace(base, n_steps=100, save_steps=30, save_every_minutes=10.0)
    assert "14 saves of 2 s, against 7;" in hours_ratios(often, timed(72.0, 2.0), saves=0.5)[1]
    once = replace(plan, n_steps=10)
    with pytest.raises(NotMeasurableError, match=r"has 1 save, and 0\.5 times as many"):
        hours_ratios(once, timed(1.0, 2.0), saves=0.5)


def test_read_speeds_are_compared_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def speed(path: Path) -> tuple[float, str]:
        asked.append(path.parts[-3])
        return (4e9 if "target" in path.parts else 1e9), "256 MiB in order"

    monkeypatch.setattr(compare_trials, "measure_file", speed)
    pair = Staged(
        kind="rows", key="k", source=str(tmp_path / "source"), target=str(tmp_path / "target"),
        reason="it is on a local disk", n_files=1, n_bytes=1,
    )  # fmt: skip
    ratios, how = read_speed_ratios(pair, n_repeats=3)
    assert ratios == [4.0, 4.0, 4.0] and "256 MiB" in how
    assert asked == ["source", "target", "target", "source", "source", "target"]
    with pytest.raises(NotMeasurableError, match="in place: it is on a local disk"):
        read_speed_ratios(replace(pair, target=None), n_repeats=3)
