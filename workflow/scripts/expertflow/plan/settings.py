"""The settings of a training run, each declared only here."""

from typing import TYPE_CHECKING, Annotated, Literal

from expertflow.core.records import Record
from expertflow.core.settings import (
    BOTH,
    LENGTH,
    LOG,
    NOTHING,
    PROCESSES,
    SCHEDULE,
    SPEED,
    WEIGHTS,
    Reported,
    Setting,
)
from expertflow.train.optimizers import OPTIMIZERS, SCHEDULES

# Type checkers reject a computed Literal; at run time it checks the names.
if TYPE_CHECKING:
    Optim = str
    Schedule = str
else:
    Optim = Literal[tuple(OPTIMIZERS)]
    Schedule = Literal[tuple(SCHEDULES)]

Method = Literal["full", "lora", "qlora"]
TrainedDtype = Literal["fp32", "bf16"]
Parallel = Literal["ddp", "fsdp"]
Tracker = Literal["none", "tensorboard", "wandb"]
Loader = Literal["thread", "workers"]
CompileMode = Literal["default", "reduce-overhead"]
Packing = Literal["bfd", "concat", "none"]
Overflow = Literal["split", "truncate", "drop"]
Masked = Literal["varlen", "sdpa", "flex", "eager"]
Whole = Literal["embed_tokens", "lm_head"]


# Every linear layer except the head, whatever the model family calls them; the name is peft's.
ALL_LINEAR = "all-linear"
# peft's name for a model's only adapter.
ADAPTER = "default"


class LoraSpec(Record, frozen=True, kw_only=True):
    r: Annotated[int, Setting("Rank.", BOTH, ge=1)] = 16
    alpha: Annotated[int, Setting("Scale is alpha / r.", BOTH, ge=1)] = 32
    dropout: Annotated[float, Setting("Dropout before the adapter, 0-1.", BOTH, ge=0, lt=1)] = 0.05
    targets: Annotated[
        tuple[str, ...],
        Setting(
            "Linear layers that get an adapter; all-linear: all but the head.",
            BOTH,
            or_text=ALL_LINEAR,
            min_length=1,
        ),
    ] = (ALL_LINEAR,)
    modules_to_save: Annotated[
        tuple[Whole, ...],
        Setting(
            "embed_tokens, lm_head: trained in full alongside the adapter, in fp32; tied ones stay "
            "tied.",
            BOTH,
            by_hand=False,
        ),
    ] = ()
    init_from: Annotated[
        str | None,
        Setting(
            "Folder of an adapter to continue from, with the same model and settings.",
            WEIGHTS,
            min_length=1,
            by_hand=False,
        ),
    ] = None
    # Of that folder's contents.
    init_sha256: str | None = None
    use_dora: Annotated[bool, Setting("Weight-decomposed adapters (DoRA).", BOTH)] = False
    use_rslora: Annotated[bool, Setting("Scale alpha / sqrt(r) instead.", BOTH)] = False


class Training(Record, frozen=True, kw_only=True):
    """Settings that ``plan_training`` resolves: null means ``auto``, or not requested."""

    method: Annotated[Method, Setting("What is trained.", BOTH)] = "lora"
    lora: Annotated[LoraSpec | None, Setting("Adapter, for lora and qlora.", BOTH)] = LoraSpec()
    batch_size: Annotated[int | None, Reported("Micro-batch in rows.", SPEED, ge=1, auto=True)] = (
        None
    )
    gradient_accumulation_steps: Annotated[
        int | None, Reported("Micro-batches per optimizer step.", SPEED, ge=1, auto=True)
    ] = None
    group_by_length: Annotated[
        bool,
        Setting("Without packing, rows of similar length share a step, in seeded order.", BOTH),
    ] = True
    num_train_epochs: Annotated[float, Reported("Passes over the rows.", LENGTH, gt=0)] = 1.0
    max_steps: Annotated[
        int | None, Setting("Optimizer steps; if set, replaces the epochs.", LENGTH, ge=1)
    ] = None
    target_tokens: Annotated[
        int | None, Setting("Tokens to train on; if set, replaces the epochs.", LENGTH, ge=1)
    ] = None
    min_epochs: Annotated[
        float | None, Setting("Lower bound on the epochs that target_tokens take.", LENGTH, gt=0)
    ] = None
    max_epochs: Annotated[
        float | None, Setting("Upper bound on the epochs that target_tokens take.", LENGTH, gt=0)
    ] = None
    learning_rate: Annotated[
        float, Reported("Peak learning rate.", WEIGHTS, gt=0, neutral=1e-5)
    ] = 2e-4
    lr_scheduler_type: Annotated[
        Schedule, Reported("Schedule after warm-up.", WEIGHTS, neutral="linear")
    ] = "cosine"
    lr_decay_ratio: Annotated[
        float,
        Setting(
            "warmup_stable_decay: share of the steps in which the rate falls to 0.",
            SCHEDULE,
            gt=0,
            le=1,
            neutral=1.0,
        ),
    ] = 0.1
    warmup_ratio: Annotated[
        float, Setting("Share of all steps, 0-1.", SCHEDULE, ge=0, lt=1, neutral=0.0)
    ] = 0.1
    warmup_steps_min: Annotated[
        int, Setting("Desired lower bound on warm-up steps.", SCHEDULE, ge=0, neutral=0)
    ] = 10
    warmup_steps_max: Annotated[
        int, Setting("Upper bound on warm-up steps.", SCHEDULE, ge=0, neutral=0)
    ] = 1000
    override_min_warmup: Annotated[
        bool, Setting("Let the ratio win over warmup_steps_min in short runs.", SCHEDULE)
    ] = True
    weight_decay: Annotated[
        float, Reported("Decoupled weight decay, not on norms and biases.", WEIGHTS, ge=0)
    ] = 0.0
    max_grad_norm: Annotated[float, Reported("Gradient clipping; 0 is off.", BOTH, ge=0)] = 1.0
    adam_beta1: Annotated[float, Reported("First moment.", WEIGHTS, ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Reported("Second moment.", WEIGHTS, ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[
        float, Setting("Added to the root of the second moment.", WEIGHTS, gt=0)
    ] = 1e-8
    optim: Annotated[
        Optim, Reported("Optimizer; adamw_8bit has 8-bit moments and needs bitsandbytes.", BOTH)
    ] = "adamw_torch_fused"
    label_smoothing_factor: Annotated[
        float,
        Setting("Share of a target spread over the vocabulary in training.", BOTH, ge=0, lt=1),
    ] = 0.0
    max_loss: Annotated[
        float | None,
        Setting(
            "Training loss in nats per token above which the run is stopped as diverged; auto: "
            "twice the loss of guessing, or of the first step.",
            WEIGHTS,
            gt=0,
            auto=True,
        ),
    ] = None
    bf16: Annotated[bool, Reported("bfloat16 autocast on cards that support it.", BOTH)] = True
    pure_bf16: Annotated[
        bool,
        Reported(
            "Method full in bfloat16 without an fp32 copy: half the memory; updates below about "
            "1/256 of a weight are lost.",
            BOTH,
        ),
    ] = False
    fp16: Annotated[bool, Reported("float16 autocast with a scaler; excludes bf16.", BOTH)] = False
    use_tf32: Annotated[bool, Setting("TF32 matrix products on cards that support it.", BOTH)] = (
        True
    )
    use_sdpa: Annotated[
        bool, Setting("torch attention kernels; false means attention eager.", BOTH, by_hand=False)
    ] = True
    attention: Annotated[
        Masked | None,
        Reported(
            "auto: the variable-length kernel where the card supports it, else one call per "
            "document. varlen requires that kernel; sdpa, flex and eager mask full rows, for "
            "comparison.",
            BOTH,
            auto=True,
        ),
    ] = None
    torch_compile: Annotated[
        bool | None, Reported("Compile the layers; auto: on a GPU.", BOTH, auto=True)
    ] = None
    torch_compile_mode: Annotated[
        CompileMode,
        Setting(
            "reduce-overhead launches a layer's kernels as one: faster small models, more "
            "memory. Not yet run on a card.",
            BOTH,
        ),
    ] = "default"
    deterministic: Annotated[
        bool, Setting("Bitwise reproducible GPU kernels, as on a CPU; slower.", BOTH)
    ] = False
    gradient_checkpointing: Annotated[
        bool | None, Reported("Recompute layers in the backward pass.", BOTH, auto=True)
    ] = None
    loader: Annotated[
        Loader | None,
        Setting(
            "How to load batches, the same either way; auto: one thread, or with packing none and "
            "dataloader_num_workers, workers.",
            SPEED,
            auto=True,
        ),
    ] = None
    dataloader_num_workers: Annotated[
        int, Setting("Worker processes if the loader is workers.", SPEED, ge=0)
    ] = 0
    dataloader_prefetch_factor: Annotated[
        int, Setting("Micro-batches to prefetch, by the thread or by each worker.", SPEED, ge=1)
    ] = 4
    dataloader_persistent_workers: Annotated[
        bool, Setting("Keep worker processes between epochs.", SPEED)
    ] = False
    save_steps: Annotated[
        int | None, Reported("Steps between checkpoints; null saves by time only.", LOG, ge=1)
    ] = None
    save_every_minutes: Annotated[
        float, Reported("Minutes between checkpoints.", NOTHING, gt=0)
    ] = 10.0
    save_total_limit: Annotated[
        int, Setting("Newest checkpoints kept, besides the best one.", LOG, ge=1, neutral=1)
    ] = 2
    load_best_model_at_end: Annotated[
        bool,
        Reported("Publish the weights with the lowest held-out loss, saved as it falls.", WEIGHTS),
    ] = False
    eval_steps: Annotated[
        int | None,
        Reported(
            "Steps between evaluations; null: about ten per run, in at most 3% of its time.",
            WEIGHTS,
            ge=1,
        ),
    ] = None
    patience: Annotated[
        int | None,
        Reported(
            "Stop after this many evaluations in a row without a held-out loss lower by "
            "min_delta; null: never.",
            WEIGHTS,
            ge=1,
        ),
    ] = None
    min_delta: Annotated[
        float, Setting("Least drop that counts for patience, in nats per token.", WEIGHTS, ge=0)
    ] = 0.0
    logging_steps: Annotated[int, Reported("Steps between log lines.", LOG, ge=1, neutral=1)] = 10
    report_to: Annotated[
        Tracker, Setting("Where losses, rate and speed go besides steps.jsonl.", NOTHING)
    ] = "none"
    world_size: Annotated[
        int, Reported("Processes that train together, one per GPU.", PROCESSES, ge=1)
    ] = 1
    parallel: Annotated[
        Parallel, Setting("Each process holds the whole model (ddp) or a shard (fsdp).", PROCESSES)
    ] = "ddp"
    n_threads: Annotated[
        int | None, Setting("CPU threads; results on a CPU depend on it.", BOTH, ge=1, auto=True)
    ] = None
    collection_interval_seconds: Annotated[
        float | None, Setting("Monitor interval; null: 1 s, less in short epochs.", NOTHING, gt=0)
    ] = None
    profile_steps: Annotated[
        int,
        Setting(
            "Steps to profile after the first ones; trace and longest kernels go next to the "
            "report. 0: none.",
            NOTHING,
            ge=0,
            le=19,
        ),
    ] = 0
    tuned: Annotated[
        str | None,
        Setting(
            "A tuning.json whose fastest settings replace auto; null: none.",
            SPEED,
            min_length=1,
            by_hand=False,
        ),
    ] = None
    track_per_step_metrics: Annotated[
        bool, Setting("Keep every step in steps.jsonl, not one line per logging interval.", LOG)
    ] = True
    gpu_memory_threshold_small_gb: Annotated[
        float, Setting("GB for micro-batch 2, without a prediction.", SPEED, by_hand=False)
    ] = 3.0
    gpu_memory_threshold_medium_gb: Annotated[
        float, Setting("GB for micro-batch 4, without a prediction.", SPEED, by_hand=False)
    ] = 5.5
    gpu_memory_threshold_large_gb: Annotated[
        float, Setting("GB for micro-batch 8, without a prediction.", SPEED, by_hand=False)
    ] = 11.0
    max_usd: Annotated[
        float | None, Setting("Budget; a plan above it is rejected.", NOTHING, gt=0, by_hand=False)
    ] = None
    max_hours: Annotated[
        float | None, Setting("Budget; a plan above it is rejected.", NOTHING, gt=0, by_hand=False)
    ] = None
    seed: Annotated[
        int, Reported("Seed of weights, order and dropout.", WEIGHTS, ge=0, neutral=0)
    ] = 42

    @property
    def trained_dtype(self) -> TrainedDtype:
        return "bf16" if self.pure_bf16 else "fp32"

    @property
    def n_shares(self) -> int:
        """The number of processes that shard the model."""
        return self.world_size if self.parallel == "fsdp" else 1


class TrainingSection(Training, frozen=True, kw_only=True):
    """The section ``training`` of a manifest, including settings read by other rules."""

    max_seq_length: Annotated[
        int | None,
        Reported(
            "Row length in tokens; auto: the shortest that cuts no document, up to 2048.",
            BOTH,
            ge=8,
            auto=True,
        ),
    ] = None
    packing: Annotated[
        Packing, Setting("Best-fit-decreasing, concatenate and cut, or one document per row.", BOTH)
    ] = "bfd"
    overflow: Annotated[
        Overflow,
        Setting("What to do with documents longer than a row, except with concat.", WEIGHTS),
    ] = "split"
    pretokenized_cache: Annotated[
        str | None,
        Setting("From older manifests, unused: rows are kept in results/{expert}/packed.", NOTHING),
    ] = None
    n_nodes: Annotated[
        int, Setting("Machines that share the processes; two or more need Slurm.", PROCESSES, ge=1)
    ] = 1
    include_epoch_summary: Annotated[
        bool, Setting("Epoch summaries are always in the report.", NOTHING, const=True)
    ] = True
