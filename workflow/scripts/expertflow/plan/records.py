"""What the plan says: every setting resolved, each with its reason, and what it should cost."""

from typing import Any, Literal

from expertflow.core.records import Record
from expertflow.hardware.records import GpuFacts
from expertflow.plan.cost_records import (
    Claim,
    ClaimCheck,
    CostPlan,
    HardwareChoice,
    HardwareOption,
    MemoryParts,
)
from expertflow.plan.origins import ORIGIN_WORDS, Origin
from expertflow.plan.settings import Loader, Training

Precision = Literal["fp32", "bf16", "fp16"]
Attention = Literal["packed", "varlen", "sdpa", "flex", "eager"]


class ModelFacts(Record, frozen=True, kw_only=True):
    """Shape of a dense decoder, as its config.json gives it.

    ``n_mlp_matrices`` is 3 where the MLP of a layer is gated, 2 where it is plain.
    """

    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    model_type: str
    n_mlp_matrices: int = 3


class PlanSpec(Training, frozen=True, kw_only=True):
    """What a plan is made from: the manifest's training settings, and hardware, prices, claims.

    ``origins`` says where settings come from that are not defaults.
    """

    origins: dict[str, Origin]
    hardware: str
    gpu_table: tuple[dict[str, Any], ...]
    prices: dict[str, dict[str, Any]]
    price_usd_per_hour: float | None
    price_as_of: str | None
    billing_minutes: float | None
    system: str | None
    claims: tuple[Claim, ...]
    compare: tuple[HardwareChoice, ...]
    # The demo is on the CPU whatever the manifest is for: a budget cannot be held there.
    may_drop_budgets: bool = False

    def told(self, setting: str) -> str:
        """Name a setting with its origin: ``save_steps of the manifest``."""
        return f"{setting} {ORIGIN_WORDS[self.origins.get(setting, 'default')]}"


class Reason(Record, frozen=True, kw_only=True):
    """Why a setting has its value, and which one the set-up that this expert replaces had."""

    setting: str
    value: str
    because: str
    origin: Origin = "computed"
    source_value: str | None = None


def make_reason(setting: str, value: object, because: str) -> Reason:
    """Return the reason for a value of any type, which is shown as text."""
    return Reason(setting=setting, value=str(value), because=because)


class TrainPlan(Training, frozen=True, kw_only=True):
    """A training run: the settings with every ``auto`` resolved, and what follows from them.

    ``origins`` says of each setting where its value comes from.

    What a thread or the workers bring is ``dataloader_prefetch_factor`` batches ahead, 0 if every
    batch is made when it is asked for.

    ``may_halve_micro_batch``: whether a run that is out of memory may go on with half of it and
    twice the accumulation. ``max_loss`` is in nats a target; null: twice what guessing gives, or
    twice the loss of the first step, whichever is more. ``n_threads`` is null where torch's own
    number is taken, ``collection_interval_seconds`` where the monitor chooses its own.

    ``flops_per_token_*`` count model FLOPs per token of packed rows, padding left out; the hardware
    figure adds what gradient checkpointing computes again.

    ``next_micro_batch_peak_bytes`` is the predicted peak of twice the micro-batch, and
    ``without_checkpointing_peak_bytes`` that with all activations kept, where they are not.
    """

    # Settings that are never null here.
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    attention: Attention  # type: ignore[assignment]
    torch_compile: bool
    loader: Loader
    dataloader_prefetch_factor: int
    save_steps: int
    eval_steps: int
    origins: dict[str, Origin]
    expert: str
    hardware: str
    gpu: GpuFacts | None
    may_halve_micro_batch: bool
    global_batch_sequences: int
    sequence_length_tokens: int
    n_sequences: int
    n_steps: int
    n_steps_per_epoch: int
    n_epochs: float
    n_warmup_steps: int
    n_decay_steps: int
    precision: Precision
    n_params_total: int
    n_params_trainable: int
    flops_per_token_model: float
    flops_per_token_hardware: float
    flops_convention: str
    predicted_tokens: int
    predicted_peak_bytes: int | None
    predicted_peak_reason: str
    cost: CostPlan
    reasons: tuple[Reason, ...]
    memory: MemoryParts | None = None
    options: tuple[HardwareOption, ...] = ()
    claims: tuple[ClaimCheck, ...] = ()
    next_micro_batch_peak_bytes: int | None = None
    without_checkpointing_peak_bytes: int | None = None
