"""Which option an answer names: labels that are numbers are no indices."""

from typing import Any

import pytest
from made_up_documents import case

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.tasks.choice import MultipleChoice, read_options, right_label

TEXTS = ["red", "blue", "green", "grey"]
FROM_1 = {"label": [1, 2, 3, 4], "text": TEXTS}
FROM_0 = {"label": [0, 1, 2, 3], "text": TEXTS}


@pytest.mark.parametrize(
    ("choices", "answer", "label"),
    [
        (FROM_1, 1, "1"),
        (FROM_1, 4, "4"),
        (FROM_1, "1", "1"),
        (dict(zip("1234", TEXTS, strict=True)), 1, "1"),
        (FROM_0, 0, "0"),
        (FROM_0, 1, "1"),
        ({"label": [3, 2, 1], "text": TEXTS[:3]}, 1, "1"),
        (TEXTS, 1, "B"),
        (["3", "1"], 1, "B"),
        ({"x": "red", "y": "blue"}, 0, "x"),
    ],
)
def test_a_number_is_a_label_where_labels_are_numbers(
    choices: Any, answer: Any, label: str
) -> None:
    assert right_label(read_options(choices), answer) == label


@pytest.mark.parametrize(("choices", "answer"), [(FROM_1, 0), (FROM_0, 4), (FROM_1, -1)])
def test_a_number_that_is_no_label_is_not_taken_for_an_index(choices: Any, answer: int) -> None:
    with pytest.raises(EvaluationError, match=r"none of the labels .*evaluation\.fields\.answer"):
        right_label(read_options(choices), answer)


@pytest.mark.parametrize("answer", [True, 4, -1])
def test_what_is_no_index_is_refused(answer: Any) -> None:
    with pytest.raises(EvaluationError, match="none of the options"):
        right_label(read_options(TEXTS), answer)


@pytest.mark.parametrize(
    ("choices", "answer", "right", "wrong"),
    [
        (["red", "blue"], "B", "blue", "red"),
        (["red", "blue"], 1, "B", "A"),
        ({"1": "red", "2": "dark  blue"}, "dark blue", "dark blue", "green"),
        ({"label": ["x", "y"], "text": ["red", "blue"]}, "y", "blue", "x"),
        (FROM_1, 1, "red", "blue"),
    ],
)
def test_an_option_is_named_by_its_text_or_label(
    choices: Any, answer: Any, right: str, wrong: str
) -> None:
    cases = [case(text, choices=choices, answer=answer) for text in (right, wrong)]
    assert [verdict.correct for verdict in MultipleChoice().score(cases)] == [True, False]


@pytest.mark.parametrize(("choices", "answer"), [(["a"], 0), ("ab", 0), (["a", "b"], "c")])
def test_choices_that_cannot_be_read_name_their_document(choices: Any, answer: Any) -> None:
    with pytest.raises(EvaluationError, match="document d7: "):
        MultipleChoice().score([case("a", choices=choices, answer=answer)])
