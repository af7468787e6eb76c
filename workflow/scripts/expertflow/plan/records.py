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

Precision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["cosine", "linear", "constant_with_warmup", "warmup_stable_decay"]
Optim = Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"]
Parallel = Literal["ddp", "fsdp"]
Tracker = Literal["none", "tensorboard", "wandb"]


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


class LoraSpec(Record, frozen=True, kw_only=True):
    """Adapter settings, as peft names them."""

    r: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]
    use_dora: bool
    use_rslora: bool


class PlanSpec(Record, frozen=True, kw_only=True):
    """Training settings as the manifest gives them; null means ``auto``."""

    method: Literal["full", "lora", "qlora"]
    lora: LoraSpec | None
    batch_size: int | None
    gradient_accumulation_steps: int | None
    num_train_epochs: float
    max_steps: int | None
    target_tokens: int | None
    min_epochs: float | None
    max_epochs: float | None
    learning_rate: float
    lr_scheduler_type: Schedule
    lr_decay_ratio: float
    warmup_ratio: float
    warmup_steps_min: int
    warmup_steps_max: int
    override_min_warmup: bool
    weight_decay: float
    max_grad_norm: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    optim: Optim
    label_smoothing_factor: float
    max_loss: float | None
    bf16: bool
    fp16: bool
    use_tf32: bool
    use_sdpa: bool
    attention: Literal["varlen", "sdpa", "flex", "eager"] | None
    torch_compile: bool | None
    deterministic: bool
    gradient_checkpointing: bool | None
    save_steps: int | None
    save_every_minutes: float
    save_total_limit: int
    load_best_model_at_end: bool
    eval_steps: int | None
    patience: int | None
    min_delta: float
    logging_steps: int
    report_to: Tracker
    world_size: int
    parallel: Parallel
    n_threads: int | None
    collection_interval_seconds: float | None
    track_per_step_metrics: bool
    loader: Literal["thread", "workers"] | None
    dataloader_num_workers: int
    dataloader_prefetch_factor: int
    dataloader_persistent_workers: bool
    group_by_length: bool
    gpu_memory_threshold_small_gb: float
    gpu_memory_threshold_medium_gb: float
    gpu_memory_threshold_large_gb: float
    seed: int
    hardware: str
    gpu_table: tuple[dict[str, Any], ...]
    prices: dict[str, dict[str, Any]]
    price_usd_per_hour: float | None
    price_as_of: str | None
    billing_minutes: float | None
    max_usd: float | None
    max_hours: float | None
    system: str | None
    claims: tuple[Claim, ...]
    compare: tuple[HardwareChoice, ...]
    # The demo is on the CPU whatever the manifest is for: a budget cannot be held there.
    may_drop_budgets: bool = False
    profile_steps: int = 0
    tuned: str | None = None


class Reason(Record, frozen=True, kw_only=True):
    """Why a setting has its value, and which one the set-up that this expert replaces had."""

    setting: str
    value: str
    because: str
    source_value: str | None = None


def make_reason(setting: str, value: object, because: str) -> Reason:
    """Return the reason for a value of any type, which is shown as text."""
    return Reason(setting=setting, value=str(value), because=because)


class LoaderPlan(Record, frozen=True, kw_only=True):
    """What brings batches to the trainer. It decides how fast they come, never what they hold.

    ``n_prefetch_batches`` is what the thread makes at a time, or what each worker has in hand; 0 if
    every batch is made when it is asked for.
    """

    kind: Literal["thread", "workers"]
    n_workers: int
    n_prefetch_batches: int
    persistent_workers: bool


class TrainPlan(Record, frozen=True, kw_only=True):
    """Settings of a training run, all resolved.

    ``may_halve_micro_batch``: whether a run that is out of memory may go on with half of it and
    twice the accumulation. ``max_loss`` is in nats a target; null: twice what
    guessing gives, or twice the loss of the first step, whichever is more.

    ``collection_interval_seconds`` is null where the monitor chooses its own.

    ``flops_per_token_*`` count model FLOPs per token of packed rows, padding left out; the hardware
    figure adds what gradient checkpointing computes again.

    ``profile_steps`` is how many steps a profiler watches; it decides nothing about the weights.

    ``next_micro_batch_peak_bytes`` is the predicted peak of twice the micro-batch, and
    ``without_checkpointing_peak_bytes`` that with all activations kept, where they are not.
    """

    expert: str
    method: Literal["full", "lora", "qlora"]
    lora: LoraSpec | None
    hardware: str
    gpu: GpuFacts | None
    world_size: int
    parallel: Parallel
    micro_batch_size: int
    may_halve_micro_batch: bool
    n_accumulation_steps: int
    global_batch_sequences: int
    sequence_length_tokens: int
    n_sequences: int
    n_steps: int
    n_steps_per_epoch: int
    n_epochs: float
    n_warmup_steps: int
    learning_rate: float
    lr_scheduler_type: Schedule
    n_decay_steps: int
    weight_decay: float
    max_grad_norm: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    optim: Optim
    label_smoothing_factor: float
    max_loss: float | None
    precision: Precision
    use_tf32: bool
    attention: Literal["packed", "varlen", "sdpa", "flex", "eager"]
    torch_compile: bool
    deterministic: bool
    checkpoint_activations: bool
    save_steps: int
    save_every_minutes: float
    save_total_limit: int
    load_best_model_at_end: bool
    eval_steps: int
    patience: int | None
    min_delta: float
    logging_steps: int
    report_to: Tracker
    n_threads: int | None
    collection_interval_seconds: float | None
    track_per_step_metrics: bool
    loader: LoaderPlan
    group_by_length: bool
    seed: int
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
    profile_steps: int = 0
