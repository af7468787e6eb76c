"""Refuse an evaluation that names what its task does not read, or not what it does."""

import difflib
from collections.abc import Collection
from typing import Any

from expertflow.core.errors import ConfigError
from expertflow.evaluate.tasks.registry import TASKS


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
    scorer = TASKS.get(task)
    all_fields = frozenset[str]().union(*(one.fields for one in TASKS.values()))
    known_fields = all_fields if scorer is None else scorer.fields
    _refuse_unknown(fields, known_fields, f"{where}: evaluation.fields", task)
    if not by_record:
        known = frozenset[str]().union(*(one.artefacts for one in TASKS.values()))
        own = frozenset[str]() if scorer is None else scorer.artefacts
        _refuse_unknown(artefacts, known, f"{where}: evaluation.artefacts", task, own)
    for needed in () if scorer is None else scorer.required:
        key, _, name = needed.partition(".")
        there = bool(artefacts) if by_record and key == "artefacts" else name in evaluation[key]
        if not there:
            raise ConfigError(
                f"{where}: evaluation.task {task} reads evaluation.{needed}, which is not set;"
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
