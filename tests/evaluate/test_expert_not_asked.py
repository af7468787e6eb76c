"""What was not asked counts as wrong, and neither as cut off nor as least expected."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_documents import spec

from expertflow.evaluate import expert_sides
from expertflow.evaluate.answers import worst
from expertflow.evaluate.ask import Held
from expertflow.evaluate.expert_sides import Asker
from expertflow.evaluate.generate import Answer
from expertflow.evaluate.records import Example, Verdict

FIELDS = {"choices": "options", "answer": "right"}


def questions(n: int) -> list[Held]:
    fields = {"options": ["a", "b"], "right": "a"}
    return [
        Held(Example(document_id=f"s/{i}", prompt="q", reference="a", fields=fields), [1])
        for i in range(n)
    ]


def asker(task: str, fields: dict[str, str]) -> Asker:
    anything: Any = SimpleNamespace(get=lambda _: None, engine=None, end_id=1, pad_id=0)
    return Asker(
        models=anything, spec=spec(task=task, fields=fields), speaker=anything,
        held_out=anything, micro_batch_size=1, metric=task, hindrance=None,
    )  # fmt: skip


ANSWERS = [
    Answer("a", 1, ended=True),
    Answer("a", 1, ended=False),
    Answer("", 0, ended=False, hindrance="no position"),
]


def test_a_question_that_was_not_asked_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_sides.generate, "answers", lambda *_, **__: ANSWERS)
    said = asker("exact_match", {}).said(None, questions(3))
    assert (said.n_cut_off, said.n_tokens) == (1, 2)
    assert [verdict.kind for verdict in said.verdicts] == ["correct", "correct", "not_asked"]


def test_a_choice_that_was_not_asked_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_sides, "choose_options", lambda *_, **__: ANSWERS)
    said = asker("multiple_choice", FIELDS).said(None, questions(3))
    assert (said.n_cut_off, said.n_tokens) == (None, None)
    assert said.verdicts[2] == Verdict(correct=False, kind="not_asked", detail="no position")


def test_the_worst_whose_loss_is_unknown_come_last() -> None:
    wrong = Verdict(correct=False, kind="different")
    outcome: Any = SimpleNamespace(
        texts=[""] * 4, verdicts=[wrong] * 4, reference_losses=[math.inf, 1.0, math.nan, 2.0]
    )
    found = worst(questions(4), outcome, outcome)
    assert [one.document_id for one in found] == ["s/3", "s/1", "s/0", "s/2"]
    assert [one.reference_loss for one in found] == [2.0, 1.0, None, None]
