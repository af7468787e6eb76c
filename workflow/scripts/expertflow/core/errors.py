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

import errno

from expertflow.core.format import show_hidden


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


_FULL = "no space left; free some, or move results/ to another disk"
_CLOSED = "cannot be opened or written by this user; correct its permissions, or its owner"
# What a user can cause and repair, and what to do about it.
OS_ERRORS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: "is on a file system that is read-only; mount it for writing, or use --directory",
    errno.ENAMETOOLONG: "is a longer name than the file system takes; shorten it",
    errno.ENOTDIR: "a file lies where a folder is needed; move it away, or name another folder",
}


def describe_os_error(error: OSError) -> str | None:
    """Return the line for a user that an error of the system is worth; null for a bug."""
    fix = OS_ERRORS.get(error.errno or 0)
    return fix and f"{error.filename or 'the file system of the output'}: {fix}"


def single_line(message: object, limit: int | None = None) -> str:
    r"""Return a message, or an error's, on one line that may be printed, cut at ``limit``.

    >>> single_line(ValueError("a\n  b"))
    'a b'
    """
    return show_hidden(" ".join(str(message).split()))[:limit]
