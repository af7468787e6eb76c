"""Records of an export."""

from pathlib import Path
from typing import Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.evaluate.records import Decoding

# Cards in the merged model's folder: its own, and one for pushing the adapter alone.
CARD = "README.md"
ADAPTER_CARD = ".adapter_card.md"


def export_command(folder: Path) -> str:
    """Return the command that exports the expert of a results folder."""
    # Resolved, because the folder may be given as a dot.
    return f"snakemake --cores 8 results/{folder.resolve().name}/export.json"


MergedInto = Literal["base", "dequantized base"] | None


class ExportSpec(Record, frozen=True, kw_only=True):
    """Settings of ``export_model``. ``dtype`` auto keeps that of the base model's weights.

    ``hub_datasets`` are the card's, by source; ``system_prompt`` is the one used in training.
    """

    expert: str
    description: str
    decoding: Decoding
    dtype: Literal["auto", "fp32", "bf16"]
    hub_datasets: dict[str, str] = field(default_factory=dict)
    system_prompt: str | None = None
    added_tokens: tuple[str, ...] = ()


class ExportRecord(Record, frozen=True, kw_only=True):
    """An exported model, merged if an adapter was trained (null ``merged_into``: no adapter).

    Losses, in nats per target over some held-out rows, and logits compare the trained model with
    the written files. ``published_step`` is the step of these weights.
    """

    expert: str
    path: str
    published_step: int
    dtype: str
    merged_into: MergedInto
    loss_before_merge: float
    loss_after_merge: float
    n_rows_compared: int
    max_logit_difference: float
    weights_sha256: str
    n_bytes: int


class MergeComparison(Record, frozen=True, kw_only=True):
    """Differences from the trained model, in nats per target and absolute logits, with bounds."""

    loss_before_merge: float
    loss_after_merge: float
    n_rows_compared: int
    n_targets: int
    allowed_loss_difference: float
    max_logit_difference: float
    allowed_logit_difference: float

    @property
    def holds(self) -> bool:
        """Whether both stay within their bounds; NaN does not."""
        moved = abs(self.loss_after_merge - self.loss_before_merge)
        same_loss = moved <= self.allowed_loss_difference
        return same_loss and self.max_logit_difference <= self.allowed_logit_difference
