"""References that no scorer takes are found before anything is generated, and cost no other."""

from collections.abc import Sequence

import pytest
from made_up_documents import document, spec

from expertflow.core.errors import EvaluationError
from expertflow.data.layout import chatml_layout
from expertflow.evaluate.records import Example, Verdict
from expertflow.evaluate.references import judgeable, unusable
from expertflow.evaluate.tasks import score
from expertflow.evaluate.unseen import seeded_key

LAYOUT = chatml_layout()


class Judge:
    """Takes no reference that says bad; counts how often it is started."""

    n_starts = 0

    def __call__(self, asked: Sequence[Example], texts: Sequence[str]) -> list[Verdict]:
        self.n_starts += 1
        for example in asked:
            if example.reference == "bad":
                raise EvaluationError(f"document {example.document_id}: no number")
        return [Verdict(correct=True, kind="correct") for _ in texts]


def example(number: int, reference: str) -> Example:
    return Example(document_id=f"d{number}", prompt="q", reference=reference, fields={})


def test_good_references_are_judged_at_once() -> None:
    judge = Judge()
    assert unusable([example(i, "good") for i in range(100)], judge) == {}
    assert judge.n_starts == 1
    assert unusable([], judge) == {}


def test_each_bad_one_is_named_and_few_starts_find_it() -> None:
    judge = Judge()
    asked = [example(i, "bad" if i in (3, 4, 90) else "good") for i in range(100)]
    assert unusable(asked, judge) == {i: f"document d{i}: no number" for i in (3, 4, 90)}
    assert judge.n_starts < 50


def test_others_take_the_place_of_bad_ones_in_the_order() -> None:
    how = spec(max_examples=20, n_selection_examples=4)
    documents = [document(i, f"q{i}", "" if i % 10 else "bad") for i in range(60)]
    ordered = sorted(documents, key=seeded_key(how.seed))
    expected = [one.document_id for one in ordered if one.row % 10][:24]
    found = judgeable(documents, how, LAYOUT, Judge())
    assert [one.document_id for one in found.documents] == expected
    last = [one.document_id for one in ordered].index(expected[-1])
    assert found.n_unusable == last + 1 - 24 > 0
    assert found.reason is not None and found.reason.endswith("no number")


def test_two_of_a_handful_are_borne_but_not_all() -> None:
    two = [document(i, f"q{i}", "bad" if i < 2 else "") for i in range(4)]
    assert judgeable(two, spec(), LAYOUT, Judge()).n_unusable == 2
    with pytest.raises(EvaluationError, match="2 of 2 held-out references"):
        judgeable(two[:2], spec(), LAYOUT, Judge())


@pytest.mark.parametrize(("n_bad", "raises"), [(8, False), (9, True), (40, True)])
def test_many_are_a_fault_of_the_setting(n_bad: int, raises: bool) -> None:
    how = spec(max_examples=99)
    documents = [document(i, f"q{i}", "bad" if i < n_bad else "") for i in range(40)]
    if not raises:
        assert judgeable(documents, how, LAYOUT, Judge()).n_unusable == n_bad
        return
    with pytest.raises(EvaluationError, match=r"cannot be judged by evaluation\.task exact_match"):
        judgeable(documents, how, LAYOUT, Judge())


def test_where_none_of_the_first_can_be_judged_no_more_are_tried() -> None:
    judge = Judge()
    documents = [document(i, f"q{i}", "bad") for i in range(500)]
    with pytest.raises(EvaluationError, match="10 of 10 held-out references"):
        judgeable(documents, spec(max_examples=400), LAYOUT, judge)
    assert judge.n_starts < 20


def test_a_schema_that_refuses_its_own_reference_is_dropped_and_others_are_judged() -> None:
    def judge(asked: Sequence[Example], texts: Sequence[str]) -> list[Verdict]:
        return score(
            "json_schema", examples=asked, predictions=texts, fields={"schema": "s"}, artefacts={}
        )

    schemas = ['{"type": "object"}', '{"type": "array"}', '{"$ref": "#/missing"}', "true"]
    asked = [
        Example(document_id=f"d{i}", prompt="q", reference="{}", fields={"s": schema})
        for i, schema in enumerate(schemas)
    ]
    found = unusable(asked, judge)
    assert sorted(found) == [1, 2]
    assert found[1].startswith("document d1: the schema refuses the reference: ")
