"""Hours and dollars: the model of a step, priors, calibrations, and the same on other hardware."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from plan_fixtures import PACKING, QWEN_06B, TABLE, card, draft_of, plan, reasons_of, seq
from support import LORA, ROOT

from expertflow.core.errors import ConfigError
from expertflow.plan.cost import (
    count_best_saves,
    count_evals,
    count_saves,
    round_up_hours,
    step_work,
)
from expertflow.plan.records import (
    Calibration,
    HardwareChoice,
    HardwareOption,
    StepSeconds,
    TrainPlan,
)
from expertflow.plan.show import options_table, plan_text
from expertflow.plan.step_time import (
    BAND,
    CardSpeed,
    StepWork,
    bound_of,
    bound_words,
    card_speed,
    predict_step,
)
from expertflow.plan.tuned import calibration_key
from expertflow.tokens.arrow import PackedRows
from expertflow.tokens.ragged import Ragged
from expertflow.train.feed.loader import make_feed

MEASURED = Calibration(
    expert="e", hardware="cpu", key="", n_timed_steps=30, n_timings=30,
    step_s=0.5, step_s_low=0.4, step_s_high=0.6, step_s_mean=0.5, save_s=2.0, eval_s=3.0,
    startup_s=12.0,
)  # fmt: skip


def calibrated(name: str | None, *, mean_s: float = 0.5, **changes: Any) -> TrainPlan:
    gpu = card(name) if name else None
    prior = plan(gpu, **{k: v for k, v in changes.items() if not k.startswith("max_")})
    measured = replace(MEASURED, step_s_mean=mean_s, key=calibration_key(prior, "qwen3"))
    return plan(gpu, calibration=measured, **changes)


def test_fp16_is_priced_at_the_fp16_peak() -> None:
    small = plan(card("RTX 2060"), seq(512))
    assert small.precision == "fp16"
    assert small.cost.mfu_fraction is not None and small.cost.predicted_hours is not None
    rate = small.flops_per_token_model * small.predicted_tokens / small.cost.predicted_hours / 3600
    assert small.cost.mfu_fraction == pytest.approx(rate / 25.8e12)
    # There is no published run on such a card.
    assert "a similar one" in small.cost.reason
    # Full precision is priced at the TF32 peak, or not at all.
    for is_on in (True, False):
        full = plan(card("H100 SXM"), bf16=False, use_tf32=is_on).cost
        assert (full.predicted_hours is not None) is is_on


def test_recomputation_takes_time_and_does_not_count_as_mfu() -> None:
    plain, again = (plan(card("H100 SXM"), gradient_checkpointing=on).cost for on in (False, True))
    assert again.predicted_hours is not None and plain.predicted_hours is not None
    assert again.mfu_fraction is not None and plain.mfu_fraction is not None
    ratio = again.predicted_hours / plain.predicted_hours
    assert 1.2 < ratio < 1.5
    assert again.mfu_fraction == pytest.approx(plain.mfu_fraction / ratio)


def test_a_plan_states_what_binds_and_what_a_switch_would_change() -> None:
    made = plan(card("H100 SXM"), batch_size=2, gradient_checkpointing=False)
    cost = made.cost
    assert cost.step is not None and cost.step_hours is not None
    parts = to_builtins(cost.step)
    total = parts.pop("total_s")
    assert total == pytest.approx(sum(parts.values()))
    assert cost.step_hours * 3600 / made.n_steps == pytest.approx(total, rel=0.01)
    assert cost.bound == bound_of(cost.step) and bound_words(cost.step) in cost.reason
    changes = {change.setting: change for change in cost.changes}
    # Without accumulation there is no larger micro-batch of the same rows.
    assert list(changes) == ["gradient_checkpointing", "torch_compile"]
    again = changes["gradient_checkpointing"]
    assert again.fits and again.step_s > total
    assert changes["torch_compile"].value == "False" and changes["torch_compile"].step_s > total
    other = plan(card("H100 SXM"), batch_size=2, gradient_checkpointing=True).cost.step
    assert other is not None and other.total_s == pytest.approx(again.step_s)
    halved = plan(card("H100 SXM"), batch_size=1, gradient_accumulation_steps=4).cost
    assert (halved.changes[0].setting, halved.changes[0].value) == ("batch_size", "2")
    text = plan_text(made)
    assert "bound by " in text
    assert "gradient_checkpointing True" in text
    # A card without a bandwidth, or a CPU, has none of it.
    for gpu in (replace(card("H100 SXM"), peak_bandwidth_bytes_per_s=None), None):
        bare = plan(gpu).cost
        assert (bare.step, bare.bound, bare.changes, bare.predicted_hours) == (None, None, (), None)
        assert bare.reason.startswith("no estimate")


@pytest.mark.parametrize("grouped", [True, False])
def test_padding_that_the_trainer_cuts_off_takes_no_time(grouped: bool) -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, 1_000).astype(np.int32).clip(8, 2048)
    n, n_padding = len(lengths), int((2048 - lengths).sum())
    split = replace(
        PACKING.train, n_documents=n, n_sequences=n, n_tokens=int(lengths.sum()),
        n_padding_tokens=n_padding,
    )  # fmt: skip
    edges = np.unique(np.geomspace(1, lengths.max() + 1, 32).astype(int))
    counts = np.histogram(lengths, edges)[0].tolist()
    told = replace(PACKING.histogram, edges=tuple(edges.tolist()), counts=tuple(counts))
    unpacked = replace(PACKING, packing="none", train=split, histogram=told)
    made = plan(card("H100 SXM"), unpacked, batch_size=4, group_by_length=grouped)
    ids_NL, none = np.zeros((n, 2048), np.int32), np.zeros(n + 1, int)
    rows = PackedRows((ids_NL,), Ragged(lengths, np.arange(n + 1)), Ragged(lengths[:0], none))
    feed = make_feed(made, rows)
    trained = [feed.collator.batch(micro).max_length for micro in feed.between(0, n // 4)]
    found = step_work(draft_of(card("H100 SXM"), packing=unpacked), made).n_tokens
    assert found == pytest.approx(4 * np.mean(trained), rel=0.08)


def test_an_epoch_shorter_than_a_step_has_its_own_step_time() -> None:
    rows = replace(
        PACKING.train, n_tokens=400, n_sequences=2, sum_len_sq=200 * 400,
        n_target_tokens=100,
    )  # fmt: skip
    two_rows = replace(PACKING, train=rows)
    fixed = {"gradient_accumulation_steps": 1, "gradient_checkpointing": False, "max_steps": 9}
    h100 = card("H100 SXM")
    whole, large = (plan(h100, two_rows, batch_size=n_rows, **fixed) for n_rows in (2, 8))
    assert large.n_sequences == 2 and large.n_steps == whole.n_steps == 9
    assert large.cost.predicted_hours == whole.cost.predicted_hours
    assert large.cost.step == whole.cost.step is not None


def test_a_calibration_predicts_hours_and_dollars_for_a_cpu() -> None:
    made = calibrated(None, price_usd_per_hour=0.5, save_steps=100, eval_steps=200)
    cost, steps = made.cost, made.n_steps
    n_saves, n_evals = -(-steps // 100), 1 + -(-steps // 200)
    expected = (steps * 0.5 + n_saves * 2 + n_evals * 3 + 12) / 3600
    assert cost.calibrated and cost.predicted_hours == pytest.approx(expected)
    assert cost.predicted_usd == pytest.approx(expected * 0.5)
    rest = expected - steps * 0.5 / 3600
    assert cost.predicted_hours_low == pytest.approx((steps * 0.4 / 3600 + rest) * 0.95)
    assert cost.predicted_hours_high == pytest.approx((steps * 0.6 / 3600 + rest) * 1.05)
    assert cost.mfu_fraction is None


def test_steps_that_took_much_longer_widen_the_band_and_others_do_not_count() -> None:
    calm, rough = calibrated(None).cost, calibrated(None, mean_s=0.9).cost
    assert rough.predicted_hours == calm.predicted_hours
    assert rough.predicted_hours_high is not None and calm.predicted_hours_high is not None
    assert rough.predicted_hours_high > 1.2 * calm.predicted_hours_high
    assert "some took much longer, for a mean of 0.9 s" in rough.reason
    assert "longer" not in calm.reason
    # The high end includes saves of the best so far.
    plain, best = (calibrated(None, eval_steps=7, load_best_model_at_end=on).cost for on in (0, 1))
    assert best.predicted_hours == plain.predicted_hours
    assert (best.predicted_hours_high or 0) > (plain.predicted_hours_high or 0)
    assert "more saves, of the best so far" in best.reason and "best" not in plain.reason
    other = plan(None, calibration=replace(MEASURED, key="H100 SXM; something else")).cost
    assert not other.calibrated and other.predicted_hours is None
    assert "for another run (H100 SXM) and is ignored" in other.reason


@pytest.mark.parametrize("save_steps", [1, 7, 300, 1000])
@pytest.mark.parametrize("step_s", [0.25, 7.0, 64.0])
def test_saves_are_counted_like_in_the_loop(save_steps: int, step_s: float) -> None:
    made = plan(
        None, max_steps=1000, save_steps=save_steps, save_every_minutes=1.0, eval_steps=30,
        load_best_model_at_end=True,
    )  # fmt: skip
    assert count_evals(made) == 1 + -(-1000 // 30)
    predicted = count_saves(made, step_s)
    for best in (False, True):
        n_saves, saved_at = 0, 0
        for step in range(1, 1001):
            overdue = (step - saved_at) * step_s > 60
            improved = best and step % 30 == 0
            if overdue or improved or step == 1000 or step % save_steps == 0:
                n_saves, saved_at = n_saves + 1, step
        assert predicted <= n_saves <= predicted + best * count_best_saves(made)


def test_the_demo_ignores_budgets_that_cannot_be_checked() -> None:
    made = plan(None, max_usd=5.0, max_hours=1.0, may_drop_budgets=True)
    for key in ("max_usd", "max_hours"):
        assert reasons_of(made)[key].because.startswith("ignored: the demo")
    with pytest.raises(ConfigError, match="max_hours is"):
        calibrated(None, max_hours=0.001, may_drop_budgets=True)


def test_time_is_billed_in_whole_steps() -> None:
    assert round_up_hours(0.51, None) == 0.51
    assert round_up_hours(0.51, 15) == 0.75
    assert round_up_hours(0.75, 15) == 0.75
    prices = {"H100 SXM": {"usd_per_hour": 2.0, "as_of": "2026-11-01", "billing_minutes": 60,
                           "storage_usd_per_hour": 0.5}}  # fmt: skip
    cost = plan(card("H100 SXM"), prices=prices).cost
    assert cost.price_usd_per_hour == 2.5
    assert cost.predicted_hours is not None and cost.predicted_hours < 1
    assert cost.predicted_usd == 2.5
    # Each card has its own price; storage has one price for all.
    assert plan(card("H100 SXM"), prices=prices, world_size=2).cost.price_usd_per_hour == 4.5
    hourly = {"H100 SXM": {"usd_per_hour": 2.0, "as_of": "2026-11-01"}}
    assert plan(card("H100 SXM"), prices=hourly, billing_minutes=60).cost.predicted_usd == 2.0


def test_a_budget_is_checked_against_the_middle_with_a_warning_at_the_high_end() -> None:
    cost = plan(card("H100 SXM")).cost
    assert cost.predicted_hours is not None and cost.predicted_hours_high is not None
    between = (cost.predicted_hours + cost.predicted_hours_high) / 2
    for hours, is_warned in ((between, True), (99.0, False)):
        reason = reasons_of(plan(card("H100 SXM"), max_hours=hours))["max_hours"]
        assert ("the high end above it" in reason.because) is is_warned
        assert reason.value == f"{hours:g}"
    with pytest.raises(ConfigError, match="max_hours is"):
        plan(card("H100 SXM"), max_hours=cost.predicted_hours * 0.9)
    # Cents are shown as cents.
    with pytest.raises(ConfigError, match=r"max_usd is 0\.001 but the plan needs \$0\.\d*[1-9]"):
        plan(card("H100 SXM"), max_usd=0.001, price_usd_per_hour=2.0)
    reason = reasons_of(plan(card("H100 SXM"), max_usd=1.0, price_usd_per_hour=0.01))["max_usd"]
    assert "$0.00," not in reason.because and "is $0.000" in reason.because


LORA_WORK = StepWork(
    facts=QWEN_06B, lora=LORA, n_tokens=16_384, n_micro_batches=2, mean_context_tokens=256,
    supervised_fraction=0.3, checkpoint=False, compiled=True, is_quantized=False,
    n_trained=5_000_000,
)  # fmt: skip


def speed(name: str = "H100 SXM") -> CardSpeed:
    found = card_speed(card(name), "bf16", use_tf32=True)
    assert isinstance(found, CardSpeed)
    return found


def step(name: str = "H100 SXM", **changes: Any) -> StepSeconds:
    return predict_step(LORA_WORK._replace(**changes), speed(name))


def test_parts_scale_with_their_inputs() -> None:
    plain = step()
    assert plain.total_s == pytest.approx(
        plain.products_s + plain.attention_s + plain.layers_s + plain.loss_s + plain.optimizer_s
    )
    again = step(checkpoint=True)
    assert again.attention_s == pytest.approx(plain.attention_s * 4 / 3)
    assert again.products_s > plain.products_s and again.layers_s > plain.layers_s
    assert again.loss_s == plain.loss_s
    # 4-bit weights are dequantized for each pass: two, and a third with recomputation.
    twice, thrice = (step(is_quantized=True, checkpoint=on).weights_s for on in (False, True))
    assert plain.weights_s == 0 and thrice == pytest.approx(1.5 * twice)
    # More bandwidth at the same peak shortens only what moves bytes.
    wide = step("H200 SXM")
    assert wide.attention_s == pytest.approx(plain.attention_s)
    assert wide.layers_s == pytest.approx(plain.layers_s * 3350 / 4800)


def test_what_binds_depends_on_the_micro_batch() -> None:
    assert bound_of(step()) == "products"
    assert bound_of(step(compiled=False)) == "bandwidth"
    small = step(n_tokens=128)
    assert bound_of(small) == "launches" and small.launches_s > small.products_s


def test_a_card_without_known_trainings_has_a_wider_band() -> None:
    low, high = BAND
    assert speed("A100 80GB").band == BAND
    assert speed("B200").band == (low**2, high**2)
    assert "similar" in speed("B200").basis and "similar" not in speed().basis


def test_published_trainings_are_predicted_within_the_bars() -> None:
    bench = [sys.executable, str(Path(ROOT) / "bench" / "step_model.py")]
    told = subprocess.run(bench, capture_output=True, text=True, check=True).stdout.splitlines()
    sure = json.loads(told[-1])["sure"]
    assert sure["rows"] >= 20 and sure["median_error"] < 0.15 and not sure["above_35_percent"]
    # The plan's band equals the one found there.
    assert sure["band"] == pytest.approx(BAND, abs=0.005)


PRICES = {
    "H100 SXM": {"usd_per_hour": 2.5, "as_of": "2026-11-01"},
    "RTX 4090": {"usd_per_hour": 0.4, "as_of": "2026-11-01"},
}


def compared(*choices: tuple[str, int], on: str = "H100 SXM", **changes: Any) -> TrainPlan:
    wanted = tuple(HardwareChoice(name=name, n_gpus=n) for name, n in choices)
    settings = {"prices": PRICES, "compare": wanted, "gpu_table": tuple(TABLE), **changes}
    return plan(card(on), **settings)


def named(made: TrainPlan, name: str, n_gpus: int = 1) -> HardwareOption:
    [option] = [o for o in made.options if (o.name, o.n_gpus) == (name, n_gpus)]
    return option


def test_hours_depend_on_the_card_and_dollars_on_the_price() -> None:
    others = (("RTX 4090", 1), ("H100 SXM", 1), ("H100 SXM", 2), ("L40S", 1), ("H200 SXM", 1))
    made = compared(*others, gradient_checkpointing=True)
    # The planned hardware is first, and once.
    assert [(o.name, o.n_gpus) for o in made.options] == [others[1], others[0], *others[2:]]
    assert made.options[0].hours == made.cost.predicted_hours
    one, two = made.options[0], named(made, "H100 SXM", 2)
    slow, bare = named(made, "RTX 4090"), named(made, "L40S")
    assert one.hours and two.hours and slow.hours
    assert two.hours == pytest.approx(one.hours / 2, rel=0.02)
    assert two.usd == pytest.approx(one.usd, rel=0.02)
    # Less than the ratio of peaks, as an H100 reaches a smaller share of its own.
    assert 2 * one.hours < slow.hours < one.hours * 989.5 / 165.2
    # The H200 has the H100's peak and more bandwidth.
    wide = named(made, "H200 SXM")
    assert wide.hours and 0.7 * one.hours < wide.hours < one.hours
    assert slow.usd == pytest.approx(0.4 * slow.hours)
    assert "2 cards assumed to share perfectly" in two.remark and "bound by" in two.remark
    assert (bare.usd, bare.usd_per_hour) == (None, None)
    assert bare.hours is not None and "no price in prices.yaml" in bare.remark


def test_the_global_batch_stays() -> None:
    made = compared(("H100 SXM", 2), ("A100 80GB", 4), batch_size=16, gradient_checkpointing=True)
    assert made.global_batch_sequences == 16
    for option in made.options:
        assert option.micro_batch_size is not None
        assert 16 % (option.micro_batch_size * option.n_gpus) == 0
    assert named(made, "A100 80GB", 4).micro_batch_size in (1, 2, 4)
    for rows, micro in ((3, 1), (10, 2)):
        made = compared(("A100 80GB", 4), batch_size=rows, gradient_checkpointing=True)
        odd = named(made, "A100 80GB", 4)
        assert odd.micro_batch_size == micro
        assert f"{rows} rows a step do not divide evenly" in odd.remark


def test_sharding_is_tried_if_copies_do_not_fit() -> None:
    row = {"name": "ten", "bf16_tflops": 100, "memory_gb": 10, "source": "made up"}
    settings = {"method": "full", "lora": None, "gpu_table": (*TABLE, row)}
    option = named(compared(("ten", 4), **settings), "ten", 4)
    assert option.fits is True and "parallel fsdp" in option.remark
    assert named(compared(("ten", 1), **settings), "ten").fits is False
    whole = compared(("ten", 4), **settings, optim="adamw_8bit")
    assert "parallel fsdp" not in named(whole, "ten", 4).remark
    in_4_bits = compared(("H100 SXM", 2), method="qlora", lora=LORA, parallel="fsdp")
    option = named(in_4_bits, "H100 SXM", 2)
    assert option.fits is False and "cannot shard 4-bit weights" in option.remark


def test_unknown_or_too_large_options_are_null() -> None:
    made = compared(("H900", 1), ("RTX 2060", 1), method="full", lora=None)
    option, small = named(made, "H900"), named(made, "RTX 2060")
    assert (option.fits, option.hours) == (None, None)
    assert "no such row" in option.remark
    # Hardware that does not fit is labeled.
    assert small.fits is False and "GiB but RTX 2060 has less" in small.remark
    assert (small.hours, small.usd, small.micro_batch_size) == (None, None, None)
    bare = replace(card("L40S"), memory_total_bytes=None, peak_bf16_flops_per_s=None)
    [alone] = plan(bare).options
    assert (alone.fits, alone.hours) == (None, None)


def test_the_table_marks_the_fastest_and_the_cheapest_if_known() -> None:
    lines = options_table(compared(("RTX 4090", 1), ("L40S", 1), ("RTX 2060", 1))).splitlines()
    assert lines[0].split() == ["hardware", "fits", "rows", "time", "$/h", "dollars", "remark"]
    assert "quickest" in lines[1] and "quickest" not in "".join(lines[2:])
    assert sum("cheapest" in line for line in lines) == 1
    assert "cheapest" not in options_table(compared(("L40S", 1)))
    compare = (HardwareChoice(name="H100 SXM", n_gpus=1),)
    on_a_cpu = plan(None, compare=compare, gpu_table=tuple(TABLE))
    assert on_a_cpu.options == () and options_table(on_a_cpu) == ""
