"""What export says: the model as people will load it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """A model on disk, merged if an adapter was trained (null ``merged_into``: no adapter).

    Losses, in nats a target over some held-out rows, and logits compare the trained model with the
    files as they are loaded by anyone.
    """

    expert: str
    path: str
    dtype: str
    merged_into: Literal["base", "dequantised base"] | None
    loss_before_merge: float
    loss_after_merge: float
    n_rows_compared: int
    max_logit_difference: float
    weights_sha256: str
    n_bytes: int
