"""Every error a user can cause, in one tree.

    ExpertflowError
    ├── ConfigError       a manifest, the command line, or two settings that contradict each other
    ├── DataError         a source, a record, a split, or a packed row
    ├── HardwareError     a device, memory, a disk
    ├── TrainingError     a model, a checkpoint, a loss that is not finite
    └── EvaluationError   a task, a prediction, a scorer

A message names the thing (key, or file and line), its value, and what to do about it. Scripts print
it as one line on stderr and exit with 1; anything outside this tree is a bug and keeps its
traceback.
"""


class ExpertflowError(Exception):
    """Base of all errors that end in one line for the user."""


class ConfigError(ExpertflowError):
    """A setting is unknown, of the wrong type, or contradicts another one."""


class DataError(ExpertflowError):
    """A source, a record or a stage's data cannot be used as it is."""


class HardwareError(ExpertflowError):
    """The machine lacks something that the plan needs."""


class TrainingError(ExpertflowError):
    """Training cannot start, go on, or be resumed."""


class EvaluationError(ExpertflowError):
    """A model cannot be scored as the manifest asks."""


class Interrupted(Exception):
    """A signal asked a run to stop; what can be resumed is saved."""
