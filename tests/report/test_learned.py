"""Which comparisons decide, and how large a difference is beside its interval."""

import math
from typing import Any

import pytest

from expertflow.report import learned

Report = dict[str, Any]


def test_more_questions_by_hand() -> None:
    """A standard error of 2 points at 100 questions; 1 point is seen in 80 % at 2.8 of them."""
    half = 1.959964 * 0.02
    change = {"difference": 0.01, "ci95": [0.01 - half, 0.01 + half], "n": 100}
    needed = 100 * (2.801585 * 0.02 / 0.01) ** 2
    assert learned.n_more_to_see(change) == math.ceil(needed) - 100
    # Half the difference takes four times the questions, in all.
    change["difference"] = 0.005
    assert learned.n_more_to_see(change) == math.ceil(4 * needed) - 100
    change["difference"] = 0.0
    assert learned.n_more_to_see(change) is None


def test_the_best_baseline_is_the_one_that_scores_highest(gpu_report: Report) -> None:
    evaluation = gpu_report["evaluation"]
    best = learned.best_baseline(evaluation)
    assert best is not None and best["name"] == "nearest"
    # Of equals, the one that the expert beats least surely.
    evaluation["baselines"][0] |= {"value_fraction": best["value_fraction"]}
    evaluation["baselines"][0]["change"] |= {"ci95": [0.1, 0.5]}
    first = learned.best_baseline(evaluation)
    assert first is not None and first["name"] == "constant"
    for baseline in evaluation["baselines"]:
        baseline["value_fraction"] = None
    assert learned.best_baseline(evaluation) is None


@pytest.mark.parametrize(
    ("quantity", "said"),
    [
        ("held_out_loss", "\u22120.250 nats a token, 95 % interval \u22120.400 to \u22120.100"),
        ("exact_match", "\u221225.0 points, 95 % interval \u221240.0 to \u221210.0"),
    ],
)
def test_changes_are_said_in_their_unit(quantity: str, said: str) -> None:
    change = {"quantity": quantity, "difference": -0.25, "ci95": [-0.4, -0.1]}
    assert learned.spelled(change) == said
