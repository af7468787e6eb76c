"""The same work on other hardware."""

from typing import Any

import pytest
from msgspec.structs import replace
from plan_fixtures import TABLE, card, plan
from support import LORA

from expertflow.plan.records import HardwareChoice, HardwareOption, TrainPlan
from expertflow.plan.show import options_table

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


def test_hours_go_with_the_card_and_dollars_with_the_price() -> None:
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
    # Less than by the peaks, as an H100 reaches a smaller share of its own.
    assert 2 * one.hours < slow.hours < one.hours * 989.5 / 165.2
    # The H200 has the H100's peak and more bandwidth.
    wide = named(made, "H200 SXM")
    assert wide.hours and 0.7 * one.hours < wide.hours < one.hours
    assert slow.usd == pytest.approx(0.4 * slow.hours)
    assert "2 cards taken to share perfectly" in two.remark and "bind" in two.remark
    assert (bare.usd, bare.usd_per_hour) == (None, None)
    assert bare.hours is not None and "no price in prices.yaml" in bare.remark


def test_the_global_batch_stays() -> None:
    made = compared(("H100 SXM", 2), ("A100 80GB", 4), batch_size=16, gradient_checkpointing=True)
    assert made.global_batch_sequences == 16
    for option in made.options:
        assert option.micro_batch_size is not None
        assert 16 % (option.micro_batch_size * option.n_gpus) == 0
    assert named(made, "A100 80GB", 4).micro_batch_size in (1, 2, 4)
    odd = compared(("A100 80GB", 4), batch_size=3, gradient_checkpointing=True)
    assert "3 rows a step do not divide evenly" in named(odd, "A100 80GB", 4).remark


def test_shares_are_tried_where_copies_do_not_fit() -> None:
    row = {"name": "ten", "bf16_tflops": 100, "memory_gb": 10, "source": "made up"}
    settings = {"method": "full", "lora": None, "gpu_table": (*TABLE, row)}
    option = named(compared(("ten", 4), **settings), "ten", 4)
    assert option.fits is True and "parallel fsdp" in option.remark
    assert named(compared(("ten", 1), **settings), "ten").fits is False
    whole = compared(("ten", 4), **settings, optim="adamw_8bit")
    assert "parallel fsdp" not in named(whole, "ten", 4).remark
    in_4_bits = compared(("H100 SXM", 2), method="qlora", lora=LORA, parallel="fsdp")
    option = named(in_4_bits, "H100 SXM", 2)
    assert option.fits is False and "cannot share out 4-bit weights" in option.remark


def test_what_is_unknown_or_does_not_fit_is_null() -> None:
    made = compared(("H900", 1), ("RTX 2060", 1), method="full", lora=None)
    option, small = named(made, "H900"), named(made, "RTX 2060")
    assert (option.fits, option.hours) == (None, None)
    assert "no such row" in option.remark
    # What does not fit says so.
    assert small.fits is False and "GiB and RTX 2060 has less" in small.remark
    assert (small.hours, small.usd, small.micro_batch_size) == (None, None, None)
    bare = replace(card("L40S"), memory_total_bytes=None, peak_bf16_flops_per_s=None)
    [alone] = plan(bare).options
    assert (alone.fits, alone.hours) == (None, None)


def test_the_table_marks_the_quickest_and_the_cheapest_where_they_are_known() -> None:
    lines = options_table(compared(("RTX 4090", 1), ("L40S", 1), ("RTX 2060", 1))).splitlines()
    assert lines[0].split() == ["hardware", "fits", "rows", "time", "$/h", "dollars", "remark"]
    assert "quickest" in lines[1] and "quickest" not in "".join(lines[2:])
    assert sum("cheapest" in line for line in lines) == 1
    assert "cheapest" not in options_table(compared(("L40S", 1)))
    compare = (HardwareChoice(name="H100 SXM", n_gpus=1),)
    on_a_cpu = plan(None, compare=compare, gpu_table=tuple(TABLE))
    assert on_a_cpu.options == () and options_table(on_a_cpu) == ""
