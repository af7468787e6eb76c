"""Records of an export."""

from typing import Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.evaluate.records import Decoding

MergedInto = Literal["base", "dequantized base"] | None


class ExportSpec(Record, frozen=True, kw_only=True):
    """Settings of ``export_model``. ``dtype`` auto keeps the type of the base model's weights.

    ``hub_datasets`` maps sources to data sets on the hub, for the model card; ``system_prompt`` is
    that of the training chats.
    """

    expert: str
    description: str
    decoding: Decoding
    dtype: Literal["auto", "fp32", "bf16"]
    hub_datasets: dict[str, str] = field(default_factory=dict)
    system_prompt: str | None = None


class ExportRecord(Record, frozen=True, kw_only=True):
    """An exported model, merged if an adapter was trained (null ``merged_into``: no adapter).

    Losses, in nats a target over some held-out rows, and logits compare the trained model with the
    written files. ``published_step`` is the step of these weights.
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
