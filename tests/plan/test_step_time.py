"""The model of a step: what binds, what scales with what, and what published trainings say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plan_fixtures import QWEN_06B, card
from support import LORA, ROOT

from expertflow.plan.records import StepSeconds
from expertflow.plan.step_time import BAND, CardSpeed, StepWork, bound_of, card_speed, predict_step

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


def test_a_product_takes_its_flops_or_its_bytes() -> None:
    fast = CardSpeed(flops_per_s=1e12, bytes_per_s=1e9, is_fitted=True)
    assert fast.product_s(1000, 1000, 1000, 2) == pytest.approx(3e6 * 2 / 1e9)
    assert fast._replace(bytes_per_s=1e12).product_s(1000, 1000, 1000, 2) == pytest.approx(2e-3)


def test_parts_go_with_what_they_are_made_of() -> None:
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


def test_what_binds_goes_with_the_size_of_a_micro_batch() -> None:
    assert bound_of(step()) == "products"
    assert bound_of(step(compiled=False)) == "bandwidth"
    small = step(n_tokens=128)
    assert bound_of(small) == "launches" and small.launches_s > small.products_s


def test_a_card_of_which_no_training_is_known_has_a_wider_band() -> None:
    low, high = BAND
    assert speed("A100 80GB").band == BAND
    assert speed("B200").band == (low**2, high**2)
    assert "similar" in speed("B200").basis and "similar" not in speed().basis


def test_published_trainings_are_predicted_within_the_bars() -> None:
    bench = [sys.executable, str(Path(ROOT) / "bench" / "step_model.py")]
    told = subprocess.run(bench, capture_output=True, text=True, check=True).stdout.splitlines()
    sure = json.loads(told[-1])["sure"]
    assert sure["rows"] >= 20 and sure["median_error"] < 0.15 and not sure["above_35_percent"]
    # The plan's band is the one that is found there.
    assert sure["band"] == pytest.approx(BAND, abs=0.005)
