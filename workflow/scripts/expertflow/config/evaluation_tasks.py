"""Refuse an evaluation that names what its task does not read, or not what it does."""

import difflib
from collections.abc import Collection
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.evaluate.records import TASK_FIELDS

ARTEFACTS = {"sql_execution": frozenset({"database"}), "cypher": frozenset({"graph"})}
NEEDED = (
    ("sql_execution", "artefacts", "database"),
    ("json_schema", "fields", "schema"),
    ("typescript_tests", "fields", "tests"),
    ("multiple_choice", "fields", "choices"),
    ("multiple_choice", "fields", "answer"),
)


def check_task(evaluation: dict[str, Any], where: str) -> None:
    """Refuse a task without what it reads: training would be over before it is missed.

    An artefact of another task is no mistake, as presets and overrides change the task alone; nor
    is another task's field where nothing is scored.

    Raises:
        ConfigError: a name is missing or unknown.
    """
    task, fields, artefacts = evaluation["task"], evaluation["fields"], evaluation["artefacts"]
    # The record's field names the artefact, whatever that is called.
    by_record = task == "sql_execution" and "database" in fields
    known_fields = (
        frozenset().union(*TASK_FIELDS.values()) if task == "held_out_loss" else TASK_FIELDS[task]
    )
    _refuse_unknown(fields, known_fields, f"{where}: evaluation.fields", task)
    if not by_record:
        known = frozenset().union(*ARTEFACTS.values())
        own = ARTEFACTS.get(task, frozenset())
        _refuse_unknown(artefacts, known, f"{where}: evaluation.artefacts", task, own)
    for needing, key, name in NEEDED:
        there = bool(artefacts) if by_record and key == "artefacts" else name in evaluation[key]
        if task == needing and not there:
            raise ConfigError(
                f"{where}: evaluation.task {task} reads evaluation.{key}.{name}, which is not set;"
                " set it, or use another task"
            )


def _refuse_unknown(
    names: Collection[str],
    known: frozenset[str],
    place: str,
    task: str,
    own: frozenset[str] | None = None,
) -> None:
    for name in sorted(set(names) - known):
        near = difflib.get_close_matches(name, sorted(known), n=1)
        takes = ", ".join(sorted(known if own is None else own)) or "none"
        hint = f"did you mean {near[0]!r}?" if near else f"task {task} takes {takes}"
        raise ConfigError(f"{place}.{name} is read by nothing; {hint}")
