import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.plan.schedule import n_steps, steps_per_epoch, warmup_steps


@pytest.mark.parametrize(
    ("total", "expected"), [(66, 7), (1, 0), (2, 0), (20_000, 1_000), (600, 60)]
)
def test_the_warm_up_rule(total: int, expected: int) -> None:
    got = warmup_steps(total, ratio=0.1, minimum=10, maximum=1000, override_minimum=True)
    assert got == expected


def test_a_hard_minimum_wins_over_the_ratio() -> None:
    assert warmup_steps(66, ratio=0.1, minimum=10, maximum=1000, override_minimum=False) == 10
    assert warmup_steps(5, ratio=0.1, minimum=10, maximum=1000, override_minimum=False) == 4


@given(st.integers(1, 10**6), st.floats(0, 0.99), st.integers(0, 500), st.booleans())
def test_warm_up_always_ends(total: int, ratio: float, minimum: int, override: bool) -> None:
    got = warmup_steps(total, ratio=ratio, minimum=minimum, maximum=1000, override_minimum=override)
    assert 0 <= got < total


def _steps(**changes: object) -> int:
    settings: dict[str, object] = {
        "per_epoch": 10,
        "tokens_per_epoch": 1000,
        "num_train_epochs": 1.5,
        "max_steps": None,
        "target_tokens": None,
        "min_epochs": None,
        "max_epochs": None,
    }
    return n_steps(**{**settings, **changes})[0]  # type: ignore[arg-type]


def test_steps_follow_from_epochs_tokens_or_are_set() -> None:
    assert _steps() == 15
    assert _steps(max_steps=7) == 7
    assert _steps(target_tokens=2000) == 20
    assert _steps(target_tokens=10**6, max_epochs=3.0) == 30
    assert _steps(target_tokens=1, min_epochs=2.0) == 20
    assert _steps(num_train_epochs=0.01) == 1


def test_the_last_batch_of_an_epoch_may_be_smaller() -> None:
    assert steps_per_epoch(25, 25) == 1
    assert steps_per_epoch(26, 25) == 2
