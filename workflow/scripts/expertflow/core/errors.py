"""All errors that a user can cause, in one tree.

    ExpertflowError
    ├── ConfigError       a manifest, the command line, or contradictory settings
    ├── DataError         a source, a record, a split, or a packed row
    ├── HardwareError     a device, memory, a disk
    ├── TrainingError     a model, a checkpoint, a loss that is not finite
    └── EvaluationError   a task, a prediction, a scorer

A message states the thing (key, or file and line), its value, and the fix. Scripts print it as one
line on stderr and exit with 1; anything else is a bug and keeps its traceback.
"""


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


class EvaluationError(ExpertflowError):
    """A model cannot be scored as the manifest requires."""


class Interrupted(Exception):
    """A signal stopped a run; everything needed to resume is saved."""


def single_line(message: object, limit: int | None = None) -> str:
    r"""Return a message, or an error's, on one line, cut at ``limit`` characters.

    >>> single_line(ValueError("a\n  b"))
    'a b'
    """
    return " ".join(str(message).split())[:limit]
