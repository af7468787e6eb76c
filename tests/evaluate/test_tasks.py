"""Every registered task reaches its scorer with the right arguments, or reports what is missing."""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from made_up_documents import case, spec

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.records import Example, Task, Verdict
from expertflow.evaluate.tasks.base import ScoringCase
from expertflow.evaluate.tasks.choice import MultipleChoice, read_options, right_label
from expertflow.evaluate.tasks.json_schema import JsonSchema
from expertflow.evaluate.tasks.registry import TASKS


def _score(
    task: Task,
    prediction: str,
    reference: str,
    *,
    record: Mapping[str, Any] | None = None,
    fields: Mapping[str, str] | None = None,
    artifacts: Mapping[str, Path] | None = None,
) -> Verdict:
    example = Example(document_id="d7", prompt="?", reference=reference, fields=dict(record or {}))
    (verdict,) = TASKS[task].score(
        [ScoringCase(example, prediction, fields or {}, artifacts or {})]
    )
    return verdict


@pytest.fixture
def databases(tmp_path: Path) -> dict[str, Path]:
    paths = {"database": tmp_path / "a.db", "other": tmp_path / "b.db"}
    for value, path in enumerate(paths.values()):
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE t (a)")
            connection.execute("INSERT INTO t VALUES (?)", (value,))
        connection.close()
    return paths


def test_every_task_but_the_loss_has_a_scorer_and_says_what_it_needs() -> None:
    assert set(TASKS) == set(get_args(Task)) - {"held_out_loss"}
    for task in TASKS.values():
        known = {f"fields.{name}" for name in task.fields}
        known |= {f"artifacts.{name}" for name in task.artifacts}
        assert set(task.required) <= known


@pytest.mark.parametrize(
    ("task", "right", "wrong", "reference", "extra"),
    [
        ("cypher", "match (b) return b", "RETURN 1", "MATCH (a) RETURN a", {}),
        ("typescript", "f()", "g()", "f();", {}),
        (
            "typescript",
            "1 }",
            "2 }",
            "1; }",
            {"fields": {"prefix": "head"}, "record": {"head": "function f() { return "}},
        ),
        ("final_answer", "#### 4.0", "#### 5", "2 + 2\n#### 4", {}),
        ("exact_match", "a  b", "a", "a b", {}),
        (
            "json_schema",
            "[1.0]",
            "[2]",
            "[1]",
            {"fields": {"schema": "shape"}, "record": {"shape": '{"type": "array"}'}},
        ),
    ],
)
def test_each_task_judges(
    task: Task, right: str, wrong: str, reference: str, extra: dict[str, Any]
) -> None:
    assert _score(task, right, reference, **extra).correct
    assert not _score(task, wrong, reference, **extra).correct


def test_sql_asks_the_database_that_the_record_names(databases: dict[str, Path]) -> None:
    def verdict(prediction: str, **extra: Any) -> Verdict:
        return _score("sql_execution", prediction, "SELECT a FROM t", artifacts=databases, **extra)

    named: dict[str, Any] = {"fields": {"database": "db_id"}, "record": {"db_id": "other"}}
    assert verdict("SELECT 0").correct
    assert verdict("SELECT 1", **named).correct
    assert not verdict("SELECT 0", **named).correct
    named["record"] = {"db_id": "third"}
    with pytest.raises(EvaluationError, match="document d7: there is no artifact 'third'"):
        verdict("SELECT 0", **named)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_no_examples_give_no_verdicts(task: Task) -> None:
    assert TASKS[task].score([]) == []


@pytest.mark.parametrize(
    ("task", "extra", "message"),
    [
        ("json_schema", {}, r"document d7: evaluation\.fields\.schema is missing"),
        ("json_schema", {"fields": {"schema": "s"}}, "field 's'.*should hold text, found None"),
        ("sql_execution", {}, "document d7: there is no artifact 'database'"),
        ("final_answer", {}, "document d7: the reference has no number"),
        ("typescript", {}, "document d7: the reference is not TypeScript"),
    ],
)
def test_what_is_missing_is_named(task: Task, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        _score(task, "x", "let let =", **extra)


def test_code_runs_only_where_the_manifest_allows_it() -> None:
    found = TASKS["typescript_tests"].unavailable_reason(spec(task="typescript_tests"))
    assert "allow_code_execution is false" in str(found)


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"typescript_tests"}))
def test_what_scores_has_versions(task: Task) -> None:
    assert TASKS[task].unavailable_reason(spec(task=task)) is None
    assert all(TASKS[task].tools(spec(task=task)).values())


def test_a_pattern_that_backtracks_without_end_is_ended_and_spares_the_others() -> None:
    schema = '{"type": "object", "properties": {"a": {"pattern": "^(a|aa)+$"}}}'
    cases = [
        case(prediction, '{"a": "a"}', schema=schema)
        for prediction in ('{"a": "' + "a" * 50 + '!"}', '{"a": "a"}')
    ]
    task = JsonSchema()
    # Each new process also imports the judge within its processor time.
    task.cpu_s = 5
    assert [verdict.kind for verdict in task.score(cases)] == ["timed_out", "correct"]


# Options: numeric labels are not indices.
TEXTS = ["red", "blue", "green", "gray"]
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
