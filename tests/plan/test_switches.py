"""Steps and warm-up, which loader a run gets, in which order it reads, and what is said of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_fixtures import card
from support import LORA, plan_spec

from expertflow.core.errors import ConfigError
from expertflow.core.settings import name_of
from expertflow.plan.settings import Training
from expertflow.plan.switches import (
    check_settings,
    choose_grouping,
    choose_loader,
    choose_precision,
    choose_steps,
    choose_warmup,
)


def test_workers_load_unpacked_rows_or_what_they_are_told_to() -> None:
    for loader, packing, n_workers, expected in (
        (None, "bfd", 8, ("thread", 0)),
        (None, "concat", 8, ("thread", 0)),
        (None, "none", 0, ("thread", 0)),
        (None, "none", 8, ("workers", 8)),
        ("thread", "none", 8, ("thread", 0)),
        ("workers", "bfd", 8, ("workers", 8)),
    ):
        spec = plan_spec(loader=loader, dataloader_num_workers=n_workers)
        made = choose_loader(spec, packing)
        chosen = {name_of(setting): value for setting, (value, _) in made.items()}
        assert (chosen["loader"], chosen["dataloader_num_workers"]) == expected


def test_rows_are_grouped_where_they_differ_in_length() -> None:
    wanted, unwanted = (plan_spec(group_by_length=on) for on in (True, False))
    assert choose_grouping(wanted, "none") == (True, "group_by_length of the manifest")
    assert choose_grouping(unwanted, "none") == (False, "group_by_length of the manifest")
    assert choose_grouping(wanted, "bfd") == (False, "packing bfd: rows are all of one length")


def test_weights_in_bf16_are_trained_as_a_whole_where_there_is_bf16() -> None:
    spec = plan_spec(pure_bf16=True)
    assert choose_precision(spec, None)[0] == choose_precision(spec, card("H100 SXM"))[0] == "bf16"
    with pytest.raises(ConfigError, match=r"training\.pure_bf16: RTX 2060 has no bf16; set it to"):
        choose_precision(spec, card("RTX 2060"))
    for changes in ({"method": "lora", "lora": LORA}, {"bf16": False}):
        with pytest.raises(ConfigError, match=r"pure_bf16 is .*; set"):
            check_settings(plan_spec(pure_bf16=True, **changes), name=str)


def test_the_warm_up_rule_says_what_won() -> None:
    for steps, warmup, words in (
        (66, 7, "0.1 x 66 steps = 6.6, rounded; warmup_steps_min 10 gives way to the ratio"),
        (600, 60, "0.1 x 600 steps = 60, rounded"),
        (20_000, 1000, "0.1 x 20000 steps = 2e+03; warmup_steps_max is 1000"),
    ):
        assert choose_warmup(Training(), steps) == (warmup, words)
    assert choose_warmup(Training(), 1)[0] == choose_warmup(Training(), 2)[0] == 0
    hard = Training(override_min_warmup=False)
    assert choose_warmup(hard, 66) == (10, "0.1 x 66 steps = 6.6; warmup_steps_min is 10")
    assert choose_warmup(hard, 5)[0] == 4


@given(st.integers(1, 10**6), st.floats(0, 0.99), st.integers(0, 500), st.booleans())
def test_warm_up_always_ends(total: int, ratio: float, minimum: int, override: bool) -> None:
    settings = Training(warmup_ratio=ratio, warmup_steps_min=minimum, override_min_warmup=override)
    assert 0 <= choose_warmup(settings, total)[0] < total


def test_steps_follow_from_epochs_tokens_or_are_set() -> None:
    def steps(**changes: Any) -> int:
        settings = Training(**{"num_train_epochs": 1.5, **changes})
        return choose_steps(settings, 10, tokens_per_epoch=1000)[0]

    assert steps() == 15
    assert steps(max_steps=7) == 7
    assert steps(target_tokens=2000) == 20
    assert steps(target_tokens=10**6, max_epochs=3.0) == 30
    assert steps(target_tokens=1, min_epochs=2.0) == 20
    assert steps(num_train_epochs=0.01) == 1
