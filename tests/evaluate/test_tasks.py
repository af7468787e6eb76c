"""Every registered task reaches its scorer with the right arguments, or reports what is missing."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from made_up_documents import score, spec
from support import PATIENCE_S

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.records import OWN_TASK
from expertflow.evaluate.scoring import find_task, make_task, task_names
from expertflow.evaluate.tasks.json_schema import JsonSchema
from expertflow.evaluate.tasks.multiple_choice import MultipleChoice, read_options, right_label
from expertflow.evaluate.tasks.sql_execution import SqlExecution

TASKS = {name: task for name in task_names() if (task := find_task(name)) is not None}


def test_each_task_judges() -> None:
    prefix = {"prefix": "function f() { return "}
    for task, right, wrong, reference, extra in (
        ("cypher", "match (b) return b", "RETURN 1", "MATCH (a) RETURN a", {}),
        ("typescript", "1 }", "2 }", "1; }", prefix),
        ("json_schema", "[1.0]", "[2]", "[1]", {"schema": '{"type": "array"}'}),
        ("json_schema", "[1.0]", "[2]", "[1]", {"schema": {"type": "array"}}),
    ):
        judgments = score(TASKS[task], [right, wrong], reference, **extra)
        assert [one.correct for one in judgments] == [True, False]


def test_sql_queries_the_database_of_the_record(tmp_path: Path) -> None:
    databases = {"database": tmp_path / "a.db", "other": tmp_path / "b.db"}
    for value, path in enumerate(databases.values()):
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE t (a)")
            connection.execute("INSERT INTO t VALUES (?)", (value,))
        connection.close()

    def is_correct(answer: str, **record: str) -> bool:
        reference = "SELECT a FROM t"
        return score(SqlExecution, [answer], reference, artifacts=databases, **record)[0].correct

    assert is_correct("SELECT 0")
    assert is_correct("SELECT 1", database="other")
    assert not is_correct("SELECT 0", database="other")
    with pytest.raises(EvaluationError, match="document d7: there is no artifact 'third'"):
        is_correct("SELECT 0", database="third")


@pytest.mark.parametrize(
    ("task", "extra", "message"),
    [
        ("json_schema", {}, r"document d7: evaluation\.fields\.schema is missing"),
        ("json_schema", {"schema": None}, "field 'schema'.*should be text, found None"),
        ("sql_execution", {}, "document d7: there is no artifact 'database'"),
        ("final_answer", {}, "document d7: the reference has no standalone number"),
        ("typescript", {}, "document d7: the reference is not TypeScript"),
    ],
)
def test_missing_requirements_are_named(task: str, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        score(TASKS[task], ["x"], "let let =", **extra)


def test_scorers_have_versions_and_code_runs_only_if_the_manifest_allows_it() -> None:
    for name, task in TASKS.items():
        made = task(spec(task=name))
        if name == "typescript_tests":
            assert "allow_code_execution is false" in str(made.unavailable_reason())
            continue
        assert made.unavailable_reason() is None and all(made.tool_versions().values())


def test_a_pattern_that_backtracks_endlessly_is_killed_and_spares_the_others() -> None:
    schema = '{"type": "object", "properties": {"a": {"pattern": "^(a|aa)+$"}}}'
    answers = ['{"a": "' + "a" * 50 + '!"}', '{"a": "a"}']
    # Each new process also imports the task within its CPU time limit: a fraction of a second.
    limits = {"cpu_s": 2, "wall_s": PATIENCE_S}
    found = score(JsonSchema, answers, '{"a": "a"}', attributes=limits, schema=schema)
    assert [judgment.kind for judgment in found] == ["timed_out", "correct"]


ISOLATED = """
import os
from expertflow.evaluate.scoring import IsolatedTask, Judgment

class Hidden(IsolatedTask):
    metric = "hidden"
    fields = frozenset({"hint"})

    @staticmethod
    def judge_texts(answer, reference, hint):
        assert "HOME" not in os.environ
        return Judgment("correct" if answer == reference + hint else "wrong")
"""


def test_a_users_own_task_may_be_isolated(tmp_path: Path) -> None:
    path = tmp_path / "hidden.py"
    path.write_text(ISOLATED)
    task = find_task(str(path))
    assert task is not None and list(tmp_path.iterdir()) == [path]
    assert [one.kind for one in score(task, ["ab", "a"], "a", hint="b")] == ["correct", "wrong"]
    settings = spec(task="./hidden.py", artifacts={OWN_TASK: str(path)}, content={str(path): "0"})
    with pytest.raises(EvaluationError, match=r"hidden\.py: changed since this run was planned"):
        make_task(settings)


def test_a_file_without_exactly_one_complete_task_is_rejected(tmp_path: Path) -> None:
    for text, message in {
        "": "found none",
        "class A(ScoringTask): pass\nclass B(A): pass": "found A, B",
        "class A(ScoringTask): pass": "A lacks metric and judge$",
        "class A(IsolatedTask):\n    metric = 'm'": "A lacks judge_texts$",
        "exit()": "SystemExit",
    }.items():
        path = tmp_path / f"{len(text)}.py"
        path.write_text(f"from expertflow.evaluate.scoring import *\n{text}\n")
        with pytest.raises(EvaluationError, match=f"{path}: .*{message}"):
            find_task(str(path))


# Options: numeric labels are not indices.
TEXTS = ["red", "blue", "green", "gray"]
FROM_1 = {"label": [1, 2, 3, 4], "text": TEXTS}
FROM_0 = {"label": [0, 1, 2, 3], "text": TEXTS}


def test_a_number_is_a_label_if_labels_are_numbers() -> None:
    for choices, answer, label in (
        (FROM_1, 1, "1"),
        (FROM_1, "1", "1"),
        (dict(zip("1234", TEXTS, strict=True)), 1, "1"),
        (FROM_0, 0, "0"),
        ({"label": [3, 2, 1], "text": TEXTS[:3]}, 1, "1"),
        (TEXTS, 1, "B"),
        (["3", "1"], 1, "B"),
        ({"x": "red", "y": "blue"}, 0, "x"),
    ):
        assert right_label(read_options(choices), answer) == label
    labels = [(FROM_1, 0), (FROM_0, 4), (FROM_1, -1)]
    for choices, answer in (*labels, *((TEXTS, answer) for answer in (True, 4, -1))):
        with pytest.raises(EvaluationError, match=r"not one of the options .*fields\.answer"):
            right_label(read_options(choices), answer)


def test_an_option_is_identified_by_its_text_or_label() -> None:
    for choices, answer, right, wrong in (
        (["red", "blue"], "B", "blue", "red"),
        (["red", "blue"], 1, "B", "A"),
        ({"1": "red", "2": "dark  blue"}, "dark blue", "dark blue", "green"),
        ({"label": ["x", "y"], "text": ["red", "blue"]}, "y", "blue", "x"),
        # Texts that look like other options' labels.
        ({"label": ["1", "2", "3"], "text": ["3", "1", "2"]}, "1", "3", "1"),
        ({"1": "A", "2": "B", "A": "O"}, "1", "A", "O"),
    ):
        judgments = score(MultipleChoice, [right, wrong], choices=choices, answer=answer)
        assert [judgment.correct for judgment in judgments] == [True, False]
    twice = {"label": ["x", "x", "y"], "text": ["a", "b", "c"]}
    for unreadable, answer in ((["a"], 0), ("ab", 0), (["a", "b"], "c"), (twice, "y")):
        with pytest.raises(EvaluationError, match="document d7: "):
            score(MultipleChoice, ["a"], choices=unreadable, answer=answer)
