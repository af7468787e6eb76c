"""The comparison with TRL: it sees the rows of every step, and a difference is noticed."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support import ROOT, write_tiny_run

from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import read_rows
from expertflow.train.feed.loader import feed_of

sys.path.insert(0, str(ROOT / "bench"))

import train_parity
from train_parity import N_STEPS, Case, compared, rows_by_step


def log(*, losses: list[float]) -> list[dict[str, float]]:
    return [{"loss": loss, "grad_norm": 1.0, "learning_rate": 0.1} for loss in losses]


@pytest.mark.parametrize(("apart", "agrees"), [(0.009, True), (0.011, False)])
def test_one_step_beyond_the_bar_is_a_difference(apart: float, agrees: bool) -> None:
    theirs = log(losses=[2.0] * N_STEPS)
    ours = log(losses=[2.0] * (N_STEPS - 1) + [2.0 * (1 + apart)])
    for expected in (True, False):
        result = compared(Case(name="x", ours="x", agrees=expected), ours, theirs)
        assert result["largest"] == pytest.approx(apart)
        assert result["at_step"] == N_STEPS
        assert result["as_expected"] == (agrees == expected)


def test_a_run_that_stopped_early_is_no_agreement() -> None:
    short = log(losses=[2.0] * (N_STEPS - 1))
    assert not compared(Case(name="x", ours="x"), short, short)["as_expected"]


def test_the_peer_sees_the_rows_of_every_step(tmp_path: Path) -> None:
    write_tiny_run(tmp_path, n_steps=40)
    plan = read_record(TrainPlan, tmp_path / "plan.json")
    rows = read_rows(tmp_path / "packed" / "train")
    assert len(rows) % plan.global_batch_sequences, "an epoch must end with a smaller step"
    order = feed_of(plan, rows).order
    given = list(rows_by_step(tmp_path / "packed" / "train", plan, 0))
    assert len(given) == plan.n_steps
    for step, batch in enumerate(given):
        chosen = order.rows_of_step(step)
        assert len(batch.input_ids_NL) == plan.global_batch_sequences
        assert np.array_equal(batch.input_ids_NL[: len(chosen)], rows.take_ids(chosen))
        assert batch.spans.tolist()[: len(chosen)] == rows.spans.take(chosen).tolist()
        # The filling has no targets.
        assert not any(batch.spans.tolist()[len(chosen) :])


def test_the_wrong_cases_are_expected_to_differ() -> None:
    wrong = [case.change for case in train_parity.CASES if case.agrees is False]
    assert wrong == ["decay", "order"]
