"""All errors that a user can cause, in one tree.

    ExpertflowError
    ├── ConfigError       a manifest, the command line, or contradictory settings
    ├── DataError         a source, a record, a split, or a packed row
    ├── HardwareError     a device, memory, a disk
    ├── TrainingError     a model, a checkpoint, a loss that is not finite
    │   └── TransientError    another process or machine; a later attempt may succeed
    └── EvaluationError   a task, a prediction, a scorer

A message states the thing (key, or file and line), its value, and the fix. Scripts print it as one
line on stderr and exit with 1; anything else is a bug and keeps its traceback. Snakemake's later
attempts of the job end with the same line at once, unless the error is transient.
"""

from collections.abc import Iterable, Iterator

from expertflow.core.format import show_hidden

# Exit code of a job that a signal stopped, as shells write SIGTERM.
STOPPED = 143


class ExpertflowError(Exception):
    """Base of all errors reported to the user in one line."""


class ConfigError(ExpertflowError):
    """A setting is unknown, of the wrong type, or contradicts another one."""


class DataError(ExpertflowError):
    """A source, a record or a stage's data is unusable."""


class HardwareError(ExpertflowError):
    """The machine lacks something that the plan needs."""


class TrainingError(ExpertflowError):
    """Training cannot start, continue, or be resumed."""


class TransientError(TrainingError):
    """Another process or machine was in the way; a later attempt of the job may succeed."""


class EvaluationError(ExpertflowError):
    """A model cannot be scored as the manifest requires."""


class Interrupted(Exception):
    """A signal stopped a run; everything needed to resume is saved."""


def raise_faults(faults: Iterable[str]) -> None:
    """Raise a ConfigError for the first fault, if any, with the others as its notes."""
    found = list(dict.fromkeys(faults))
    if found:
        error = ConfigError(found[0])
        for fault in found[1:]:
            error.add_note(fault)
        raise error


def list_faults(error: object) -> list[str]:
    """List the faults in an error or a message; the notes of an error are further faults."""
    return [str(error), *getattr(error, "__notes__", ())]


def format_error(error: object) -> str:
    """Format an error or a message for a user, with one line per fault."""
    return "\n".join(f"error: {single_line(fault)}" for fault in list_faults(error))


def iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def single_line(message: object, limit: int | None = None) -> str:
    r"""Return a message, or an error's, as one printable line, cut at ``limit``.

    >>> single_line(ValueError("a\n  b"))
    'a b'
    """
    return show_hidden(" ".join(str(message).split()))[:limit]
