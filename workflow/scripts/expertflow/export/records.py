"""What export says: the model as people will load it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """A merged model on disk. ``max_logit_difference`` compares it with the trained one."""

    expert: str
    path: str
    dtype: str
    merged: bool
    max_logit_difference: float
    weights_sha256: str
    n_bytes: int
