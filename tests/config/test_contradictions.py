"""A task that lacks what it reads, or is given what nothing reads, is refused at once."""

from contextlib import nullcontext
from typing import Any

import pytest

from expertflow.config.contradictions import check_task
from expertflow.core.errors import ConfigError


@pytest.mark.parametrize(
    ("task", "fields", "artifacts", "message"),
    [
        ("held_out_loss", {"schema": "s"}, {"database": "x"}, None),
        ("exact_match", {}, {"database": "x"}, None),
        ("sql_execution", {"database": "which"}, {"one": "x", "two": "y"}, None),
        ("multiple_choice", {"choices": "c", "answer": "a"}, {}, None),
        ("sql_execution", {}, {}, r"reads evaluation\.artifacts\.database"),
        ("sql_execution", {"database": "which"}, {}, r"reads evaluation\.artifacts\.database"),
        ("sql_execution", {}, {"databse": "x"}, r"artifacts\.databse .*did you mean 'database'\?"),
        ("json_schema", {}, {}, r"reads evaluation\.fields\.schema"),
        ("typescript_tests", {"prefix": "p"}, {}, r"reads evaluation\.fields\.tests"),
        ("multiple_choice", {"choices": "c"}, {}, r"reads evaluation\.fields\.answer"),
        ("multiple_choice", {"answer": "c"}, {}, r"reads evaluation\.fields\.choices"),
        ("cypher", {"shema": "s"}, {}, r"fields\.shema .*did you mean 'schema'\?"),
        ("exact_match", {"schema": "s"}, {}, r"fields\.schema .*takes none"),
        ("held_out_loss", {"pattern": "s"}, {}, r"fields\.pattern is read by nothing"),
    ],
)
def test_what_a_task_does_not_read_is_refused(
    task: str, fields: Any, artifacts: Any, message: str | None
) -> None:
    refused = pytest.raises(ConfigError, match=message) if message else nullcontext()
    with refused:
        check_task({"task": task, "fields": fields, "artifacts": artifacts}, "e.yaml")
