"""Sections of report.json about the run: data, settings, training, hardware, time, cost, plan."""

from typing import Annotated, Any, Literal, get_origin, get_type_hints

from msgspec import Meta, defstruct

from expertflow.core.records import Record
from expertflow.core.settings import list_settings, name_of
from expertflow.data.records import DuplicateExample
from expertflow.hardware.records import Stats
from expertflow.plan import records as pr
from expertflow.plan.settings import LoraSpec, TrainingSection
from expertflow.report.measured import Measured, doc
from expertflow.tokens.records import DecodedSample, LengthHistogram
from expertflow.train import records as tr

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0)]
# By reason, category or engine.
Counts = dict[str, Count]
Share = Annotated[float, Meta(ge=0, le=1)]
Origin = Literal["tokenizer", "manifest", "chatml", "none"]


class Run(Record, frozen=True, kw_only=True):
    """The identity of the run."""

    id: Annotated[str, doc("Expert and the first digits of the run's fingerprint.")]
    expert: Annotated[str, doc("Name of the expert.")]
    description: Annotated[str, doc("What the expert is for, from its manifest.")]
    preset: Annotated[str, doc("demo: a small random model; or full.")]
    status: Annotated[Literal["finished"], doc("Only finished runs have a report.")]
    started_at: Annotated[str, doc("Start of training, ISO 8601.")]
    simulated: Annotated[bool, doc("Hardware samples were replayed or made up.")]


class Model(Record, frozen=True, kw_only=True):
    """The base model, and its FLOPs per token."""

    name: Annotated[str, doc("Hub id, directory or builtin name.")]
    kind: Annotated[Literal["builtin", "local", "hub"], doc("Where the base model came from.")]
    revision: Annotated[Measured[str], doc("Commit on the hub.")]
    license: Annotated[Measured[str], doc("As the model states it.")]
    params_total: Annotated[Count, doc("Parameters with adapters.")]
    params_trainable: Annotated[Count, doc("Parameters that training changed.")]
    method: Annotated[Literal["full", "lora", "qlora"], doc("What is trained.")]
    lora: Measured[LoraSpec]
    flops_per_token_model: Annotated[Amount, doc("FLOP, for MFU.")]
    flops_per_token_hardware: Annotated[Amount, doc("For HFU: adds what is recomputed.")]


class Source(Record, frozen=True, kw_only=True):
    """A data set, and the fate of its documents."""

    name: Annotated[str, doc("Its name in the manifest.")]
    kind: Annotated[str, doc("Where it came from.")]
    revision: Annotated[Measured[str], doc("Commit on the hub or in git.")]
    license: Annotated[Measured[str], doc("As the manifest states it.")]
    n_files: Annotated[Count, doc("Files that were read.")]
    n_bytes: Annotated[Count, doc("Their size.")]
    n_records: Annotated[Measured[int], doc("Records read, without those that where excludes.")]
    sha256: Annotated[str, doc("Hash of their content.")]
    notes: Annotated[tuple[str, ...], doc("What the source says about itself.")]
    n_train: Annotated[Count, doc("Documents trained on.")]
    n_held_out: Annotated[Count, doc("Documents held out.")]
    n_left_out: Annotated[Count, doc("Records rejected, filtered or dropped.")]


class Data(Record, frozen=True, kw_only=True):
    """What the model was trained on."""

    records: Annotated[Count, doc("Raw records in all sources.")]
    documents: Annotated[Count, doc("Records that became a document.")]
    documents_train: Annotated[Count, doc("Documents kept for training.")]
    documents_held_out: Annotated[Count, doc("Documents kept for evaluation.")]
    documents_with_special_text: Annotated[Count, doc("Those that name a special token.")]
    rejected_by_reason: Annotated[Counts, doc("Records that did not become a document.")]
    filtered_by_reason: Annotated[Counts, doc("Filtered out by a check, a secret, or a benchmark.")]
    dropped_by_reason: Annotated[Counts, doc("Documents that were not kept.")]
    noted_by_reason: Annotated[Counts, doc("Documents of unusual form that were accepted.")]
    kept_by_category: Annotated[Counts, doc("Documents kept, of the largest categories.")]
    duplicate_examples: tuple[DuplicateExample, ...]
    chat_template: Annotated[Origin, doc("Where it came from.")]
    samples: tuple[DecodedSample, ...]
    sources: tuple[Source, ...]
    packing: Annotated[str, doc("How documents were packed into rows.")]
    overflow: Annotated[str, doc("What was done with documents longer than a row.")]
    seq_len: Annotated[Positive, doc("Length of a row, in tokens.", of="sequence_length_tokens")]
    seq_len_reason: Annotated[str, doc("Why this length.", of="length_reason")]
    seq_len_suggestion: Annotated[str, doc("The shortest rows that cut almost no document.")]
    tokenizer_engines: Annotated[Counts, doc("Shards by engine and its version.", of="engines")]
    tokenizer_fallbacks: Annotated[tuple[str, ...], doc("Why some shards used the slower engine.")]
    sequences: Annotated[Count, doc("Rows of the training split.")]
    useful_tokens: Annotated[Count, doc("Tokens in those rows, no padding.")]
    trained_tokens: Annotated[Count, doc("Tokens over all epochs, no padding.", of="n_tokens")]
    target_tokens: Annotated[Count, doc("Trained tokens that the loss counts.")]
    padding_fraction: Annotated[Measured[Share], doc("Padding in training, as run.")]
    fill_fraction: Annotated[Measured[Share], doc("Useful share of the rows, as packed.")]
    truncated_fraction: Annotated[
        Measured[Share], doc("Tokens lost to overflow, or in pieces without targets.")
    ]
    length_histogram: LengthHistogram


def _reported_settings() -> list[tuple[str, Any]]:
    """Declare a key for every reported setting, of the type that a plan resolves it to.

    A choice is any text, because the value used may be more specific than the choice.
    """
    resolved = get_type_hints(pr.TrainPlan)
    return [
        # A plan has ``float`` where a manifest may have ``auto``.
        (s.name, Annotated[str if get_origin(s.kind) is Literal else kind, doc(s.text)])
        for s in list_settings(TrainingSection)
        if s.reported and (kind := resolved.get(s.name, s.kind))
    ]


# Any, because a type checker cannot see fields that are created at run time.
ReportedSettings: Any = defstruct(
    "ReportedSettings", _reported_settings(), bases=(Record,), frozen=True, kw_only=True
)


class TrainingParameters(ReportedSettings, frozen=True, kw_only=True):  # type: ignore[misc, call-arg]
    """Settings as used. Keys without a unit follow the names of common trainers."""

    warmup_steps: Annotated[Count, doc("Steps of rising learning rate.")]
    global_batch_sequences: Annotated[Positive, doc("Rows per step.")]
    total_steps: Annotated[Positive, doc("Optimizer steps.", of="n_steps")]
    tf32: Annotated[
        bool, doc("TF32 matrix products were allowed.", of=name_of(pr.TrainPlan.use_tf32))
    ]


class TrainingOutcome(Record, frozen=True, kw_only=True):
    """The training run. Losses are in nats per token."""

    steps: Annotated[Count, doc("Optimizer steps done.")]
    planned_steps: Annotated[Count, doc("Optimizer steps planned.")]
    stopped_early_at_step: Annotated[Measured[int], doc("After evaluations without improvement.")]
    published_step: Annotated[Count, doc("Step whose weights are published.")]
    epochs: Annotated[Amount, doc("Passes over the data done.")]
    sessions: Annotated[Count, doc("Processes; more than one if resumed.")]
    resumed_at_steps: Annotated[tuple[int, ...], doc("Where it was resumed.")]
    saves: Annotated[Count, doc("Checkpoints written.")]
    checkpoint_write_s: Annotated[Amount, doc("Writing during training, in the last session.")]
    memory_retries: tuple[tr.MemoryRetry, ...]
    fallbacks: tuple[tr.Fallback, ...]
    on_the_fly: Annotated[bool, doc("Documents were tokenized as needed, not packed.")]
    sampled_steps: Measured[tr.SampledSteps]
    activated: Annotated[tuple[str, ...], doc("Optimizations that were on.")]
    loss_first: Annotated[float, doc("Training loss at the start.")]
    loss_last: Annotated[float, doc("Training loss at the end.")]
    eval_points: tuple[tr.EvalPoint, ...]
    save_points: tuple[tr.SavePoint, ...]
    epoch_summaries: Annotated[
        tuple[tr.EpochSummary, ...], Meta(min_length=1, description="One for each epoch started.")
    ]


class Gpu(Record, frozen=True, kw_only=True):
    """The card; null if none was used or the figure is unknown."""

    name: Annotated[Measured[str], doc("As the driver names it.")]
    driver: Annotated[Measured[str], doc("Driver version.")]
    peak_flops_per_s: Annotated[
        Measured[Amount], doc("Dense, at the precision used: published, else measured.")
    ]
    peak_source: Annotated[Measured[str], doc("Source of the peak.")]
    memory_total_bytes: Annotated[Measured[Amount], doc("Memory of the card.")]
    power_limit_w: Annotated[Measured[Amount], doc("Power limit in effect.")]


class ReferenceBand(Record, frozen=True, kw_only=True):
    """A band that an earlier setup used."""

    quantity: Annotated[str, doc("Sibling key that the band is for.")]
    low: Annotated[float, doc("Low end.")]
    high: Annotated[float, doc("High end.")]
    unit: Annotated[str, doc("Unit of the ends.")]
    system: Annotated[str, doc("Whose band it is.")]
    note: Annotated[str, doc("How to read it.")]


class Hardware(Record, frozen=True, kw_only=True):
    """The machine, sampled during training."""

    collection_interval_seconds: Annotated[
        Measured[Annotated[float, Meta(gt=0)]], doc("As configured; null: the monitor chose it.")
    ]
    collection_interval_effective_seconds: Annotated[Measured[Amount], doc("As measured.")]
    samples: Annotated[Count, doc("Readings taken.")]
    watched_s: Annotated[Measured[Amount], doc("Time span that was monitored.", of="wall_s")]
    device: Annotated[str, doc("Device that trained.")]
    n_gpus: Annotated[Count, doc("Cards that trained; 0 on a CPU.")]
    threads: Annotated[Positive, doc("CPU threads of the trainer.")]
    machine: Annotated[Measured[dict[str, Any]], doc("As found by the job's preflight.")]
    gpu: Gpu
    any_kernel_percent: Annotated[Measured[Stats], doc("Some kernel ran; nothing more.")]
    sm_active_percent: Annotated[Measured[Stats], doc("Multiprocessors had work.")]
    tensor_active_percent: Annotated[Measured[Stats], doc("Tensor cores were busy.")]
    power_w: Annotated[Measured[Stats], doc("Power of the card.")]
    temperature_c: Annotated[Measured[Stats], doc("Temperature of the card.")]
    memory_used_bytes: Annotated[Measured[Stats], doc("Device memory, all processes.")]
    sm_clock_mhz: Annotated[Measured[Stats], doc("Clock of the multiprocessors.")]
    memory_clock_mhz: Annotated[Measured[Stats], doc("Clock of the memory.")]
    pcie_rx_bytes_per_s: Annotated[Measured[Stats], doc("To the card.")]
    pcie_tx_bytes_per_s: Annotated[Measured[Stats], doc("From the card.")]
    throttle_s: Annotated[
        Measured[dict[str, Amount]], doc("By cause, as sampled; causes may overlap.")
    ]
    temperature_limits_c: Annotated[
        Measured[dict[str, float]], doc("The device's own: slowdown, shutdown, max_operating.")
    ]
    cpu_percent: Annotated[Measured[Stats], doc("Load of all CPU cores.")]
    ram_used_bytes: Annotated[Measured[Stats], doc("Host memory in use.")]
    disk_read_bytes: Annotated[Measured[Amount], doc("Read from disks by the entire machine.")]
    disk_write_bytes: Annotated[Measured[Amount], doc("Written to disks by it.")]
    energy_j: Annotated[Measured[Amount], doc("Energy of the card.")]
    energy_source: Annotated[Measured[str], doc("How it was read.")]
    energy_all_j: Annotated[Measured[Amount], doc("Energy of all visible cards.")]
    power_all_w: Annotated[Measured[Stats], doc("Power of all visible cards.")]
    monitor_cpu_fraction: Annotated[
        Measured[Amount], doc("Share of one core that the monitor used.")
    ]
    memory_peak_allocated_bytes: Annotated[Measured[Amount], doc("Peak of live tensors.")]
    memory_peak_reserved_bytes: Annotated[Measured[Amount], doc("Peak held by the allocator.")]
    memory_spilled_bytes: Annotated[
        Measured[Amount], doc("Held beyond the card's highest reading: on the host.")
    ]
    host_memory_peak_bytes: Annotated[Count, doc("Resident memory of the trainer.")]
    monitor_remarks: Annotated[tuple[str, ...], doc("What qualifies the monitor's figures.")]
    reference_bands: tuple[ReferenceBand, ...]


class TrainingReport(Record, frozen=True, kw_only=True):
    """Results of training and the hardware monitor."""

    training: TrainingOutcome
    hardware: Hardware


class Time(tr.TimeSpent, frozen=True, kw_only=True):
    """Wall time and its parts, which add up within 1 %; train_s has its own parts."""

    split_source: Annotated[
        Measured[Literal["stamps", "sampled steps"]],
        doc("Host timestamps on a CPU; on a GPU, the shares in sampled steps."),
    ]


class Throughput(Record, frozen=True, kw_only=True):
    """Speed of the training steps, without saves and evaluation."""

    useful_tokens_per_s: Annotated[Measured[Amount], doc("All devices, no padding.")]
    steps_per_s: Annotated[Measured[Amount], doc("Optimizer steps.")]
    tokens_per_step: Annotated[Amount, doc("Useful tokens of a mean step.")]
    mfu_fraction: Annotated[Measured[Share], doc("Model FLOP/s over the dense peak.")]
    hfu_fraction: Annotated[Measured[Share], doc("Hardware FLOP/s over the dense peak.")]
    goodput_fraction: Annotated[Measured[Share], doc("train_s over wall_s.")]
    convention: Annotated[str, doc("How MFU and HFU are calculated.")]


class Cost(Record, frozen=True, kw_only=True):
    """Price of the wall time of training; storage as in the rate."""

    usd: Annotated[Measured[Amount], doc("usd_per_hour times hours.")]
    billed_usd: Annotated[Measured[Amount], doc("Hours rounded up to plan.billing_minutes.")]
    hours: Annotated[Amount, doc("time.wall_s in hours.")]
    usd_per_hour: Annotated[Measured[Amount], doc("The user's own price.", of="price_usd_per_hour")]
    rate_as_of: Annotated[Measured[str], doc("Date of that price.", of="price_as_of")]
    usd_per_million_tokens: Annotated[Measured[Amount], doc("Useful tokens, wall time.")]
    energy_kwh: Annotated[Measured[Amount], doc("Energy of the card.")]


class StageBill(Record, frozen=True, kw_only=True):
    """The jobs of a stage since their last success, and the attempts that failed before."""

    stage: Annotated[str, doc("Rule that ran.")]
    jobs: Annotated[Positive, doc("Its jobs.")]
    attempts: Annotated[Positive, doc("Their processes; more than jobs if some failed.")]
    wall_s: Annotated[Amount, doc("Seconds of all attempts.")]
    card_s: Annotated[Measured[Amount], doc("Those times the cards that each used.")]
    usd: Annotated[Measured[Amount], doc("card_s at the price: what a cluster bills.")]


class MachineTime(Record, frozen=True, kw_only=True):
    """From the first job to the last, without pauses of more than an hour."""

    first_start: Annotated[str, doc("ISO 8601.")]
    last_end: Annotated[str, doc("ISO 8601.")]
    n_machines: Annotated[Positive, doc("Machines that ran jobs.")]
    wall_s: Annotated[Amount, doc("Seconds with jobs running or the next one pending.")]
    usd: Annotated[Measured[Amount], doc("The full machine that trained: what a rental bills.")]
    usd_source: Annotated[str, doc("What usd was calculated from.")]


class LostAttempts(Record, frozen=True, kw_only=True):
    """Attempts of a stage whose work was discarded."""

    what: Annotated[str, doc("Stage, and what was lost.")]
    attempts: Annotated[Positive, doc("How many ended early.")]
    wall_s: Annotated[Amount, doc("Seconds lost.")]
    usd: Annotated[Measured[Amount], doc("wall_s at the price per hour.")]


class Bill(Record, frozen=True, kw_only=True):
    """Every job of the chain: stages' wall_s + between_jobs_s - overlap_s = machine.wall_s."""

    stages: tuple[StageBill, ...]
    between_jobs_s: Annotated[Amount, doc("Seconds between jobs.")]
    overlap_s: Annotated[Amount, doc("Seconds counted twice because jobs ran in parallel.")]
    idle_card_s: Annotated[Measured[Amount], doc("The training machine's, without a card job.")]
    machine: MachineTime
    lost: tuple[LostAttempts, ...]


class PlanBand(Record, frozen=True, kw_only=True):
    """Low and high ends of the predictions."""

    hours_low: Annotated[Measured[Amount], doc("Shortest time expected.")]
    hours_high: Annotated[Measured[Amount], doc("Longest time expected.")]
    usd_low: Annotated[Measured[Amount], doc("Lowest cost expected.")]
    usd_high: Annotated[Measured[Amount], doc("Highest cost expected.")]


class PlanForecast(Record, frozen=True, kw_only=True):
    """Predictions made before the run."""

    hardware: Annotated[str, doc("The hardware that was planned for.")]
    steps: Annotated[Count, doc("Optimizer steps.")]
    micro_batch_size: Annotated[
        Positive, doc("Rows of a micro-batch.", of=name_of(pr.TrainPlan.batch_size))
    ]
    gradient_accumulation_steps: Annotated[Positive, doc("Micro-batches per step.")]
    trained_tokens: Annotated[Count, doc("All epochs, no padding.", of="predicted_tokens")]
    useful_tokens_per_s: Annotated[Measured[Amount], doc("trained_tokens over their steps' hours.")]
    memory_peak_bytes: Annotated[Measured[Amount], doc("Peak device memory.")]
    memory: Measured[pr.MemoryParts]
    next_micro_batch_peak_bytes: Annotated[Measured[Amount], doc("At most, with twice the rows.")]
    without_checkpointing_peak_bytes: Annotated[
        Measured[Amount], doc("At most, with all activations kept; null if they are kept.")
    ]
    memory_reason: Annotated[str, doc("How memory was predicted.", of="predicted_peak_reason")]
    calibrated: Annotated[bool, doc("The band was measured by a short run of this plan.")]
    hours: Annotated[Measured[Amount], doc("Wall time of training.")]
    usd: Annotated[Measured[Amount], doc("Cost of training.")]
    billing_minutes: Annotated[Measured[Amount], doc("Predicted dollars are for hours rounded up.")]
    band: PlanBand
    cost_reason: Annotated[str, doc("How time and cost were predicted.", of="reason")]
    options: tuple[pr.HardwareOption, ...]
    claims: tuple[pr.ClaimCheck, ...]
    reasons: tuple[pr.Reason, ...]


class PlanRow(Record, frozen=True, kw_only=True):
    """A prediction next to its measurement."""

    quantity: Annotated[str, doc("What is compared.")]
    unit: Annotated[
        Literal["steps", "tokens", "tokens/s", "h", "usd", "bytes"], doc("Unit of the figures.")
    ]
    plan: Annotated[Measured[Amount], doc("The plan's figure.")]
    plan_low: Annotated[float | None, doc("Low end of the plan's band, if any.")]
    plan_high: Annotated[float | None, doc("High end of the plan's band.")]
    actual: Annotated[Measured[Amount], doc("What the run measured.")]
    difference_fraction: Annotated[Measured[float], doc("actual / plan - 1.")]
