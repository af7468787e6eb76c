"""The plan's explanations: why, where a value comes from, and the replaced system's value."""

from typing import Any

from msgspec.structs import replace
from plan_fixtures import PACKING, because_of, card, plan, reasons_of
from plan_fixtures import plan as plan_for

from expertflow.core.records import from_json, to_json
from expertflow.plan.claims import time_words
from expertflow.plan.records import TrainPlan
from expertflow.plan.resolve import source_values
from expertflow.plan.settings import Training
from expertflow.plan.show import plan_text
from expertflow.tokens.records import LengthChoice


def test_the_replaced_setup_is_quoted() -> None:
    for letter, setting, value in (
        ("A", "batch_size", "16"),
        ("B", "dataloader_num_workers", "physical cores // 2"),
        ("C", "sequence_length_tokens", "1536"),
        ("D", "save_steps", "2000"),
    ):
        made = reasons_of(plan(card("H100 SXM"), system=f"{letter}: a set-up"))
        assert made[setting].source_value == value
        assert set(source_values(letter, n_steps=9)) <= made.keys()
    for system in (None, "Z: unknown", "a text without a letter"):
        assert all(r.source_value is None for r in plan(None, system=system).reasons)


def test_a_row_length_is_shown_with_its_neighbors() -> None:
    lengths = (512, 1024, 2048, 4096, 8192)
    choices = tuple(
        LengthChoice(
            sequence_length_tokens=n, n_over_long_documents=(n < 4096) * 3,
            n_over_long_tokens=900, n_sequences=9, fill_fraction=0.5,
        )
        for n in lengths
    )  # fmt: skip
    because = because_of(plan(None, replace(PACKING, choices=choices)))["sequence_length_tokens"]
    over = "3 documents are longer, by 900 tokens, rows 50.0 % full"
    assert because == (f"1024: {over}; 2048: {over}; 4096: no document is longer, rows 50.0 % full")


def test_a_step_is_stated_in_documents_and_relative_to_all_data() -> None:
    for n_rows, n_documents, words in (
        (4_883, 20_000, "about 33 documents a step; a recipe for unpacked data has 8 a step, so"
         " 2,500 steps, here 611 at the same learning_rate 0.001; batch_size 2 with"
         " gradient_accumulation_steps 1 keeps about 8 a step and 2,442 steps"),
        (488, 20_000, "here 61 at the same learning_rate 0.001; packing none keeps its examples"),
        (4_883, 4_883, "about 8 documents a step"),
        (2, 9, "; the data has 2 rows, so every step sees all of them"),
    ):  # fmt: skip
        train = replace(PACKING.train, n_sequences=n_rows, n_documents=n_documents)
        made = plan(card("H100 SXM"), replace(PACKING, train=train), gradient_accumulation_steps=1)
        assert words in because_of(made)["global_batch_sequences"]
    assert "steps of 2 rows of" in plan_text(made)


def saves(**changes: Any) -> str:
    return reasons_of(plan(card("H100 SXM"), **changes))["save_steps"].because


def test_an_interruption_is_stated_in_minutes_and_dollars() -> None:
    by_time = saves(save_steps=None, save_every_minutes=0.5)
    assert by_time.startswith("save_steps is null: at the end, and every 0.5 minutes; an interr")
    assert by_time.endswith("loses at most 30 seconds")
    priced = saves(save_steps=None, save_every_minutes=0.5, price_usd_per_hour=6.0)
    assert priced.endswith("at most 30 seconds, $0.05")
    # Saves by steps may happen sooner.
    made = plan(card("H100 SXM"), save_steps=1)
    assert made.cost.step_hours is not None
    lost = time_words(made.cost.step_hours / made.n_steps)
    assert reasons_of(made)["save_steps"].because.endswith(f"loses at most {lost}")


def test_a_plan_can_be_read() -> None:
    made = plan(card("H100 SXM"), price_usd_per_hour=2.49, price_as_of="2026-11-01", system="A: x")
    text = plan_text(made)
    assert text == plan_text(from_json(TrainPlan, to_json(made)))
    for words in ("settings", "memory", "cost", "at $2.49 an hour, as of 2026-11-01", "prior"):
        assert words in text
    assert "(the setup it replaces: 4)" in " ".join(text.split())
    text = plan_text(plan(None))
    assert "hours    unknown" in text and "dry run (snakemake -n) measures" in text
    assert "dollars  unknown: no price" in text
    assert "other hardware" not in text and "claims" not in text


def test_a_plan_states_which_settings_are_given_and_computed() -> None:
    origins = {"learning_rate": "manifest", "save_steps": "command line"}
    origins["num_train_epochs"] = "overlay"
    plan = plan_for(None, origins=origins, gradient_accumulation_steps=1)
    assert set(plan.origins) == set(Training.__struct_fields__)
    assert plan.origins["learning_rate"] == "manifest"
    assert plan.origins["weight_decay"] == "default"
    assert plan.origins["batch_size"] == plan.origins["eval_steps"] == "computed"
    told = reasons_of(plan)
    assert told["save_steps"].origin == "command line"
    assert told["save_steps"].because.startswith("save_steps from the command line")
    assert told["gradient_accumulation_steps"].because.endswith("by default")
    assert told["n_steps"].origin == "computed"
    text = plan_text(plan)
    assert "manifest: learning_rate 0.001" in text and "overlay: num_train_epochs" in text
