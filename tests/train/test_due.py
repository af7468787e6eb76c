"""What is due after a step."""

import pytest

from expertflow.train.records import EvalPoint
from expertflow.train.step_hooks import out_of_patience


def points(*losses: float) -> list[EvalPoint]:
    return [
        EvalPoint(step=i, loss=loss, n_target_tokens=1, eval_s=0.0) for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "over"),
    [
        ((3.0, 2.0, 1.0), 1, 0.0, False),
        ((3.0, 2.0, 2.0), 1, 0.0, True),
        ((3.0, 2.0, 2.1), 2, 0.0, False),
        ((3.0, 2.0, 2.1, 2.0), 2, 0.0, True),
        ((3.0, 2.0, 2.1, 1.9, 1.95), 2, 0.0, False),
        ((3.0, 2.95, 2.91), 2, 0.1, True),  # slower than min_delta
        ((3.0, 2.95, 2.85), 2, 0.1, False),  # slow, but together they are enough
        ((3.0, 3.0, 3.0), None, 0.0, False),
    ],
)
def test_patience(
    losses: tuple[float, ...], patience: int | None, min_delta: float, over: bool
) -> None:
    assert out_of_patience(points(*losses), patience, min_delta) is over
