"""Find the tasks of lm-evaluation-harness that a manifest names; needs no model."""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.records import LM_EVAL_FILES, LmEvalSpec


def unavailable_reason() -> str | None:
    if importlib.util.find_spec("lm_eval") is None:
        return "lm_eval is not installed; see envs/requirements-lm-eval.lock"
    return None


def find_tasks(spec: LmEvalSpec) -> tuple[Any, list[str]]:
    """Return the harness's manager of tasks, and their names; no manager if it is not installed.

    Raises EvaluationError for an unusable file or, if the harness is installed, an unknown name.
    """
    files = [Path(task) for task in spec.tasks if task.endswith(LM_EVAL_FILES)]
    for file in files:
        # A task's YAML may have custom tags, so it is not parsed.
        named = rf"""^(task|group):\s*["']?{re.escape(file.stem)}["']?\s*(#|$)"""
        if not re.search(named, file.read_text("utf-8"), re.MULTILINE):
            raise EvaluationError(
                f"evaluation.lm_eval.tasks: {file}: has no line 'task: {file.stem}'; rename the"
                " file or the task"
            )
    names = [Path(task).stem if task.endswith(LM_EVAL_FILES) else task for task in spec.tasks]
    if unavailable_reason() is not None:
        return None, names
    tasks: Any = importlib.import_module("lm_eval.tasks")
    folders = list(dict.fromkeys(str(file.parent) for file in files))
    # Indexing the bundled tasks takes seconds, which tasks in files do not need.
    by_name = len(files) < len(spec.tasks)
    manager = tasks.TaskManager(include_path=folders or None, include_defaults=by_name)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise EvaluationError(
            f"evaluation.lm_eval.tasks: {unknown[0]}: no such task; `lm_eval ls tasks` lists them"
        )
    return manager, names
