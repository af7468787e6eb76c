"""Cards, prices and what to compare with: the user's own files, checked where they are read."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT
from test_load import base, load

from expertflow.config.hardware_tables import HardwareTables, calibration_spec
from expertflow.config.load import load_config
from expertflow.core.errors import ConfigError
from expertflow.plan.records import PlanSpec

PRICE = {"usd_per_hour": 2.5, "as_of": "2026-11-01"}
COMPARE = [{"name": "L40S", "n_gpus": 2}]


def tables(folder: Path, prices: Any = None, **config: Any) -> HardwareTables:
    (folder / "hardware").mkdir(exist_ok=True)
    if prices is not None:
        (folder / "hardware" / "prices.yaml").write_text(yaml.safe_dump({"prices": prices}))
    settings = load_config({"experts": {"e": {}}, **config})
    return HardwareTables(settings, [folder, ROOT / "config"])


def spec(folder: Path, prices: Any = None, **config: Any) -> PlanSpec:
    return tables(folder, prices, **config).plan_spec(load(folder, base(), **config))


def test_a_spec_holds_the_rows_of_the_named_cards_and_their_prices(tmp_path: Path) -> None:
    shipped = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    made = spec(tmp_path, hardware="H100 SXM", compare=shipped["compare"])
    assert (len(made.compare), made.prices) == (7, {})
    assert ("A100 40GB", 4) in {(choice.name, choice.n_gpus) for choice in made.compare}
    prices = {"H100 SXM": {**PRICE, "provider": "x", "billing_minutes": 1}, "B200": PRICE}
    made = spec(tmp_path, prices, hardware="H100 SXM", compare=COMPARE)
    assert [row["name"] for row in made.gpu_table] == ["L40S", "H100 SXM"]
    assert made.prices == {"H100 SXM": {**PRICE, "billing_minutes": 1}}
    assert [(choice.name, choice.n_gpus) for choice in made.compare] == [("L40S", 2)]
    # A card is also known by its driver's name, and nothing is compared with a CPU.
    named = spec(tmp_path, {"NVIDIA H100 80GB HBM3": PRICE}, hardware="H100 SXM")
    assert named.prices == {"H100 SXM": PRICE}
    example = yaml.safe_load((ROOT / "config" / "hardware" / "prices.example.yaml").read_text())
    copied = spec(tmp_path, example["prices"], hardware="H100 SXM", compare=shipped["compare"])
    assert copied.prices.keys() >= {"H100 SXM", "A100 80GB"}
    on_cpu = spec(tmp_path, prices, hardware="cpu", compare=COMPARE)
    assert (on_cpu.compare, on_cpu.gpu_table) == ((), ())


@pytest.mark.parametrize(
    ("prices", "problem"),
    [
        ({"H100 SXM": {"usd_per_hour": 2.5}}, "as_of' is missing"),
        ({"H100 SXM": {**PRICE, "usd_per_hour": -1}}, "at least 0"),
        ({"H100 SXM": {**PRICE, "billing_minute": 1}}, "did you mean 'billing_minutes'"),
        ({"H100 SMX": PRICE}, r"prices names 'H100 SMX': .*did you mean 'H100 SXM'"),
        ({}, "compare names 'H900': no such row"),
    ],
)
def test_a_faulty_price_is_refused(tmp_path: Path, prices: dict[str, Any], problem: str) -> None:
    unknown = [{"name": "H900", "n_gpus": 1}]
    with pytest.raises(ConfigError, match=problem):
        spec(tmp_path, prices, hardware="H100 SXM", compare=COMPARE if prices else unknown)


def test_only_a_demo_block_leads_to_the_cpu_and_drops_budgets(tmp_path: Path) -> None:
    manifest, on = {**base(), "demo": {"description": "small"}}, tables(tmp_path, hardware="L40S")
    for preset, value, hardware in (
        ("demo", manifest, "cpu"), ("full", manifest, "L40S"), ("demo", base(), "L40S"),
    ):  # fmt: skip
        made = on.plan_spec(load(tmp_path, value, preset=preset))
        assert (made.hardware, made.may_drop_budgets) == (hardware, hardware == "cpu")


def test_a_sweep_of_learning_rates_pays_for_one_calibration(tmp_path: Path) -> None:
    def of(expert: dict[str, Any], **config: Any) -> PlanSpec:
        return calibration_spec(tables(tmp_path, hardware="H100 SXM", **config).plan_spec(expert))

    swept = {"learning_rate": 3e-6, "lr_scheduler_type": "linear", "warmup_ratio": 0.03, "seed": 7,
             "save_steps": 9, "eval_steps": 9, "save_every_minutes": 1.0, "patience": 2,
             "load_best_model_at_end": True, "report_to": "tensorboard"}  # fmt: skip
    usual = of(load(tmp_path, base()))
    assert of(load(tmp_path, base(), training=swept)) == usual
    # Nor do prices and budgets ask for another.
    budgets = load(tmp_path, base(), training={"max_usd": 5, "max_hours": 1})
    assert of(budgets, price_usd_per_hour=3.0, compare=COMPARE) == usual
    for slower in ({"batch_size": 3}, {"optim": "adamw_8bit"}, {"max_grad_norm": 0.5}):
        assert of(load(tmp_path, base(), training=slower)) != usual
