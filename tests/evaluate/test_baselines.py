"""Baselines learn from training examples alone, within a budget of judgments."""

from collections.abc import Sequence
from itertools import groupby

import pytest
from made_up_documents import example

from expertflow.core.errors import EvaluationError
from expertflow.evaluate import baselines
from expertflow.evaluate.baselines import BaselinePredictor, make_baselines
from expertflow.evaluate.records import Example, Judgment

COLUMNS = ("color", "weight", "size", "price", "maker", "year", "shape")
THINGS = ("red car", "blue chair", "old lamp", "new ship", "small boat")


def table(number: int) -> Example:
    """Ask for a table's column by the value of another one, like text-to-SQL data."""
    first, second = (COLUMNS[(number * k + 3) % len(COLUMNS)] for k in (1, 2))
    schema = f'CREATE TABLE t_{number * 7919} ("{first}" TEXT, "{second}" REAL, "note" TEXT)'
    value = f"{number * 31 % 97}.5"
    return example(
        number,
        f"{schema}\nWhat {THINGS[number % 5]} has the {first} where {second} is {value}?",
        f'SELECT "{first}" FROM t_{number * 7919} WHERE "{second}" = {value};',
    )


def equal(examples: Sequence[Example], predictions: Sequence[str]) -> list[Judgment]:
    rights = [one.reference == text for one, text in zip(examples, predictions, strict=True)]
    return [Judgment("correct" if right else "wrong") for right in rights]


def by_name(training: Sequence[Example]) -> dict[str, BaselinePredictor]:
    return {made.name: made for made in make_baselines(equal, training, 0)}


def test_a_template_fills_columns_table_and_value_with_their_punctuation() -> None:
    made = by_name([table(i) for i in range(80) if i % 7 != 0])["template"]
    new = [table(i) for i in range(100, 140) if i % 7 != 0]
    assert [made.answer(one) for one in new] == [one.reference for one in new]
    assert "⟨" in made.description and "FROM" in made.description
    greetings = [example(i, f"{'so ' * i}called w{i} {'or ' * i}", f"w{i}") for i in range(20)]
    assert by_name(greetings)["template"].answer(greetings[7]) == "w7"


def test_the_constant_looks_beyond_whole_answers() -> None:
    """Worked solutions all differ, but share what counts at their end."""

    def same_end(examples: Sequence[Example], predictions: Sequence[str]) -> list[Judgment]:
        ends = [example(0, "", one.reference.split()[-1]) for one in examples]
        return equal(ends, [text.split()[-1] for text in predictions])

    training = [example(i, f"sum {i}", f"{i} steps #### {i % 50 or 7}") for i in range(100)]
    training += [example(i, f"sum {i}", f"{i} steps #### 7") for i in range(100, 130)]
    made = make_baselines(same_end, training, 0)[0]
    assert made.answer(training[0]).endswith("#### 7")
    # A frequent answer counts, too, even if another one with its ending is shorter.
    words = [f"n{i}" for i in range(60)]
    training = [example(i, "", text) for i, text in enumerate(["is", *["so it is"] * 60, *words])]
    assert by_name(training)["constant"].answer(training[0]) == "so it is"


def test_the_nearest_questions_answer_is_used_verbatim_or_filled_in() -> None:
    training = [example(i, f"what is the {word} called", word) for i, word in enumerate(COLUMNS)]
    training += [example(9, "greet ann in french", "bonjour ann")]
    asked = example(99, "greet bob in french", "bonjour bob")
    assert by_name(training)["nearest"].answer(asked) in {one.reference for one in training}
    many = [example(i, f"greet {n} in french", f"bonjour {n}") for i, n in enumerate(COLUMNS)]
    assert by_name(many)["nearest_filled"].answer(asked) == "bonjour bob"


def test_judgments_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def counting(examples: Sequence[Example], predictions: Sequence[str]) -> list[Judgment]:
        shown.extend(predictions)
        ids = [one.document_id for one in examples]
        assert len([*groupby(ids)]) == len({*ids}), "each reference is prepared once"
        return equal(examples, predictions)

    monkeypatch.setattr(baselines, "N_JUDGMENTS", 30)
    make_baselines(counting, [table(i) for i in range(200)], 0)
    assert 0 < len(shown) <= 60


def test_an_unjudgeable_probe_does_not_end_a_baseline() -> None:
    def strict(examples: Sequence[Example], predictions: Sequence[str]) -> list[Judgment]:
        for one in examples:
            if int(one.document_id[1:]) % 5 == 0:
                raise EvaluationError(f"document {one.document_id}: the reference is no query")
        return equal(examples, predictions)

    training = [table(i) for i in range(80) if i % 7 != 0]
    made = make_baselines(strict, training, 0)
    assert [one.name for one in made] == [one.name for one in make_baselines(equal, training, 0)]


def test_too_few_examples_make_no_baseline() -> None:
    assert make_baselines(equal, [table(i) for i in range(3)], 0) == []
    assert make_baselines(equal, [example(i, "a", "  ") for i in range(9)], 0) == []
