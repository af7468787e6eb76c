"""How the workflow meets Snakemake: one line for a user's error, and runs that are refused."""

import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from expertflow.core.errors import ExpertflowError

P = ParamSpec("P")
R = TypeVar("R")


def fail(message: object) -> NoReturn:
    """End Snakemake with one line."""
    sys.exit("error: " + " ".join(str(message).split()))


def note(message: str) -> None:
    """Tell the user something that is no error."""
    print(f"note: {message}", file=sys.stderr)


def one_line(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a user's error into one line on stderr; Snakemake would print a traceback."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ExpertflowError as error:
            fail(error)

    return wrapped


def set_environment(scripts: Path) -> None:
    """Let rules find the interpreter that runs Snakemake, and the scripts beside the Snakefile.

    They call ``python $EXPERTFLOW/<rule>.py``, from whatever working directory.
    """
    interpreter = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([interpreter, os.environ.get("PATH", "")])
    os.environ["EXPERTFLOW"] = str(scripts)


def refuse_unlimited_gpus(limit: Any, *, main: bool) -> None:
    """End the run if nothing bounds the trainings that may run at once.

    Snakemake takes an undeclared resource, and one of 0, for any number.
    """
    if main and not (limit is not None and limit.value):
        fail(
            "resource gpu is not limited, so any number of trainings could start at once; add"
            " --resources gpu=1, or use the profiles beside the Snakefile"
        )


def refuse_keep_incomplete(settings: Any) -> None:
    """End the run if half-written outputs would stay: Snakemake records them as complete."""
    if settings is not None and settings.keep_incomplete:
        fail(
            "--keep-incomplete would record half-written outputs as complete; run without it:"
            " training resumes from state/ anyway"
        )


def reports_among(targets: Iterable[Any]) -> list[str]:
    """Pick the reports that a run was asked for by name; they are summed up at its end."""
    return [str(target) for target in targets if str(target).endswith("/report.json")]
