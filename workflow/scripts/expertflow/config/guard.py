"""One-line errors for users, and the environment that rules find their scripts by."""

import functools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

from expertflow.core.errors import ExpertflowError, describe_os_error, single_line
from expertflow.core.format import show_hidden

P = ParamSpec("P")
R = TypeVar("R")


def fail(message: object) -> NoReturn:
    sys.exit("error: " + single_line(message))


def note(message: str) -> None:
    print(f"note: {show_hidden(message)}", file=sys.stderr)


def one_line(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a user's error into one line on stderr; Snakemake would print a traceback."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ExpertflowError as error:
            fail(error)
        except OSError as error:
            if (line := describe_os_error(error)) is None:
                raise
            fail(line)

    return wrapped


def set_environment(scripts: Path, *, main: bool) -> None:
    """Set the environment by which rules find the interpreter and the scripts.

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
