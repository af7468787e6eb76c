"""How the workflow meets Snakemake: one line for a user's error, and runs that are refused."""

import functools
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import psutil

from expertflow.core.errors import ExpertflowError

P = ParamSpec("P")
R = TypeVar("R")


def fail(message: object) -> NoReturn:
    sys.exit("error: " + " ".join(str(message).split()))


def note(message: str) -> None:
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


def set_environment(scripts: Path, *, main: bool) -> None:
    """Let rules find the interpreter that runs Snakemake, and the scripts beside the Snakefile.

    They call ``python $EXPERTFLOW/<rule>.py``, from whatever working directory. The report tells
    the command line; in the environment it counts for no rule's settings.
    """
    interpreter = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([interpreter, os.environ.get("PATH", "")])
    os.environ["EXPERTFLOW"] = str(scripts)
    # As in the jobs: cards are counted as the driver counts them.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # How long a CPU's threads spin at a barrier before they sleep (libgomp reads it at load).
    # Its default of 300,000 rounds keeps the thread that is waited for from its core as soon as
    # anything else runs on the machine; a thousand is what it takes itself where it knows of that.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if main:
        os.environ["EXPERTFLOW_COMMAND"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


# Options with which Snakemake runs nothing, besides --dry-run.
LOOKS = {
    "--archive", "--cleanup-metadata", "--cm", "--cleanup-shadow", "--conda-cleanup-envs",
    "--conda-create-envs-only", "--container-cleanup-images", "--containerize", "--d3dag", "--dag",
    "--delete-all-output", "--delete-temp-output", "--detailed-summary", "-D", "--filegraph",
    "--generate-unit-tests", "--lint", "--list", "--list-rules", "-l", "--list-changes", "--lc",
    "--list-conda-envs", "--list-input-changes", "--li", "--list-params-changes", "--lp",
    "--list-target-rules", "--lt", "--list-untracked", "--lu", "--print-compilation", "--report",
    "--rulegraph", "--summary", "-S", "--touch", "-t", "--unlock",
}  # fmt: skip


def only_looks(arguments: Sequence[str], *, dryrun: bool) -> bool:
    """Tell whether Snakemake was started to tell something and not to run jobs.

    It does not say so itself before it has read the whole Snakefile.
    """
    options = {argument.partition("=")[0] for argument in arguments}
    return dryrun or bool(options & LOOKS and "--report-after-run" not in options)


def refuse_unlimited_gpus(limit: Any) -> None:
    """End the run if nothing bounds the trainings that may run at once.

    Snakemake takes an undeclared resource, and one of 0, for any number.
    """
    if limit is None or not limit.value:
        fail(
            "resource gpu is not limited, so any number of trainings could start at once; add"
            " --resources gpu=1, or use the profiles beside the Snakefile"
        )


def note_missing_table(settings: Any, basedir: Path) -> None:
    """Tell how to get the table of hours and dollars, where a dry run will end without it."""
    if not settings.dryrun or "expertflow" in settings.log_handler_settings:
        return
    if importlib.util.find_spec("snakemake_logger_plugin_expertflow") is None:
        how = f"pip install --no-build-isolation {basedir}/workflow/logger"
    else:
        how = "add --logger expertflow, or logger: [expertflow] to your profile"
    note(f"this dry run ends without hours and dollars; {how}")


def refuse_keep_incomplete(settings: Any) -> None:
    """End the run if half-written outputs would stay: Snakemake records them as complete."""
    if settings is not None and settings.keep_incomplete:
        fail(
            "--keep-incomplete would record half-written outputs as complete; run without it:"
            " training resumes from state/ anyway"
        )


def reports_to_sum_up(
    targets: Iterable[Any], experts: Iterable[str], *, since_s: float | None = None
) -> list[str]:
    """Pick the reports that a run was asked for by name or made; they are summed up at its end.

    ``since_s`` is a time of the system's clock, by default the start of this process.
    """
    start_s = psutil.Process().create_time() if since_s is None else since_s
    named = [str(target) for target in targets if str(target).endswith("/report.json")]
    places = [Path("results", expert, "report.json") for expert in experts]
    made = [str(p) for p in places if p.is_file() and p.stat().st_mtime >= start_s]
    return list(dict.fromkeys([*named, *made]))
