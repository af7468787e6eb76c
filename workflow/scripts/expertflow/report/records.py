"""Declare report.json once: every key with its type and description.

``workflow/schemas/report.schema.yaml`` is generated from it, and a finished report is checked
against it. Keys carry their unit, except paths that readers of older training reports use.
``Measured`` is a value or, while the report is built, the reason for its absence.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from expertflow.core.records import Record
from expertflow.evaluate import records as ev
from expertflow.export.records import ExportRecord
from expertflow.report import run_records as rr
from expertflow.report.measured import Measured, doc
from expertflow.report.run_records import Amount, Count, Positive, Share
from expertflow.staging.records import Staged
from expertflow.studies.records import AblationRecord

# Low and high end, or start and end.
Interval = tuple[float, float]
Severity = Literal["info", "warning", "problem"]
Learned = Literal["yes", "no", "unclear"]


class AcceptanceRule(Record, frozen=True, kw_only=True):
    """A bar of the manifest, on a dotted path of report.json; ``name`` is for its origin."""

    name: str | None = None
    path: str
    op: Literal[">", ">=", "<", "<=", "=="]
    value: Any


class ReportSpec(Record, frozen=True, kw_only=True):
    expert: str
    preset: str
    description: str
    acceptance: tuple[AcceptanceRule, ...]


class Scored(Record, frozen=True, kw_only=True):
    """A task's metric over the questions; null if the task has none or was not scored."""

    value_fraction: Annotated[Measured[Share], doc("The task's metric.")]
    ci95: Annotated[Measured[Interval], doc("Wilson's 95 % interval.")]
    n_examples: Annotated[Measured[int], doc("Questions asked.")]
    n_correct: Annotated[Measured[int], doc("Correct answers.")]
    n_by_kind: Annotated[Measured[dict[str, int]], doc("Verdicts by kind.")]


class Recall(Scored, frozen=True, kw_only=True):
    """The expert on questions that it was trained on, verbatim or reworded."""

    wording: Annotated[str, doc("How each is worded; {question} stands for its text.")]


class Side(Scored, frozen=True, kw_only=True):
    """One model, base or expert. The loss is in nats per token."""

    held_out_loss: Annotated[float, doc("Mean over target tokens.")]
    held_out_loss_ci95: Annotated[
        Measured[Interval], doc("Bootstrap over documents or groups, 95 %.")
    ]
    perplexity: Annotated[float, doc("exp of the held-out loss.")]
    perplexity_ci95: Annotated[Measured[Interval], doc("Bootstrap over documents or groups, 95 %.")]
    n_target_tokens: Annotated[Count, doc("Tokens behind the loss.")]
    n_documents: Annotated[Count, doc("Documents behind the loss.")]
    n_cut_off: Annotated[Measured[int], doc("Answers that reached evaluation.max_new_tokens.")]


class Baseline(Scored, frozen=True, kw_only=True):
    """A rule that answers without a model, tuned on training questions only."""

    name: Annotated[str, doc("Short name.")]
    description: Annotated[str, doc("What it answers.")]
    change: ev.PairedChange


class Candidate(Scored, frozen=True, kw_only=True):
    """A kept checkpoint."""

    step: Annotated[Count, doc("Training step.")]
    held_out_loss: Annotated[Amount, doc("In nats per token, at that step.")]
    published: Annotated[bool, doc("The chosen one.")]


class PublishedWeights(ev.Published, frozen=True, kw_only=True):
    """The weights that were evaluated and exported, and why these."""

    # The report's own Candidate, with the figures of its score next to the step.
    candidates: tuple[Candidate, ...]  # type: ignore[assignment]


class Delta(Record, frozen=True, kw_only=True):
    """After minus before, for acceptance bars to refer to; the same as in changes."""

    held_out_loss: Annotated[float, doc("In nats per token; negative is better.")]
    held_out_loss_ci95: Annotated[
        Measured[Interval], doc("Paired bootstrap over documents or groups.")
    ]
    value_fraction: Annotated[Measured[float], doc("Of the metric.")]
    ci95: Annotated[Measured[Interval], doc("Paired bootstrap over questions.")]


class Evaluation(Record, frozen=True, kw_only=True):
    """The model before and after training, on held-out documents."""

    task: Annotated[str, doc("Which task was scored.")]
    metric: Annotated[Measured[str], doc("Name of the task's metric.")]
    held_out_documents: Annotated[Count, doc("Documents of the split.")]
    n_questions_shared_with_training: Annotated[Count, doc("Trained on with another answer.")]
    before: Annotated[Side, doc("The untrained model.")]
    after: Annotated[Side, doc("The expert.")]
    changes: tuple[ev.PairedChange, ...]
    published: PublishedWeights
    baselines: tuple[Baseline, ...]
    earlier: Measured[ev.EarlierRun]
    judge: Measured[ev.JudgeResult]
    lm_eval: tuple[ev.LmEvalScore, ...]
    decoding: ev.Decoding
    tools: Annotated[dict[str, str], doc("Versions of what scored the answers.")]
    recall: tuple[Recall, ...]
    samples: Annotated[tuple[ev.EvaluationSample, ...], doc("Right and wrong answers in turn.")]
    worst: Annotated[
        tuple[ev.EvaluationSample, ...], doc("Wrong answers, formerly right ones first.")
    ]
    answers_path: Annotated[str, doc("File with every answer.")]
    unavailable: Annotated[dict[str, str], doc("Missing parts, and why.")]
    wall_s: Annotated[Amount, doc("Both sides, not part of time.wall_s.")]
    delta: Delta


class Bottleneck(Record, frozen=True, kw_only=True):
    """The largest part of wall time; within a step, according to the card's counters."""

    class_: Annotated[
        Literal[
            "compute", "memory-bound kernels", "small kernels", "step", "data", "checkpoint",
            "evaluation", "start-up", "lost-work", "unknown",
        ],
        doc("What took most of the time; step: the steps, for no known reason."),
    # ``class`` is a keyword of Python, not of JSON.
    ] = field(name="class")  # fmt: skip
    confidence: Annotated[Literal["low", "medium", "high"], doc("How sure that is.")]
    evidence: Annotated[tuple[str, ...], doc("Shares of wall time and medians of counters.")]


class Finding(Record, frozen=True, kw_only=True):
    """Something worth changing, with the evidence and the origin of the threshold."""

    code: Annotated[str, doc("Name of the rule.")]
    severity: Annotated[Severity, doc("How serious it is.")]
    evidence: Annotated[str, doc("What was observed.")]
    threshold: Annotated[str, doc("What would not be reported.")]
    threshold_origin: Annotated[str, doc("Source of the threshold.")]
    recommendation: Annotated[str, doc("What to try.")]
    worth_usd: Annotated[Amount | None, doc("Price of the measured lost time: the most saved.")]
    worth_reason: Annotated[str | None, doc("How it was calculated, or why there is none.")]


class AcceptanceVerdict(Record, frozen=True, kw_only=True):
    """The verdict on a bar; ``not measured`` if the path has null."""

    rule: Annotated[str, doc("Path, operator and bar.")]
    verdict: Annotated[Literal["pass", "fail", "not measured"], doc("Outcome.")]
    value: Annotated[Any, doc("Value at the path.")]
    reason: Annotated[str | None, doc("Why it was not measured.")] = None


class KernelKind(Record, frozen=True, kw_only=True):
    """All kernels of one kind."""

    kind: Annotated[str, doc("By the kernel's name.")]
    n_calls: Annotated[Count, doc("Launches.")]
    total_s: Annotated[Amount, doc("Seconds in all profiled steps.")]
    # Sums of floats may come out a hair above one.
    share_fraction: Annotated[float, Meta(ge=0, le=1.000001, description="Of all kernels.")]


class SortedKernel(KernelKind, frozen=True, kw_only=True):
    """All launches of one kernel."""

    name: Annotated[str, doc("As reported by the profiler.")]


class Profile(Record, frozen=True, kw_only=True):
    """Profiler results of a few steps."""

    n_steps: Annotated[Positive, doc("Steps that were profiled.")]
    first_step: Annotated[Positive, doc("The first of them; they are consecutive.")]
    device: Annotated[str, doc("cuda: kernels are counted; cpu: operators.")]
    wall_s: Annotated[Amount, doc("What these steps took while profiled.")]
    pause_s: Annotated[Amount, doc("Wait for the profiler to start and write.")]
    n_kernels: Annotated[Positive, doc("Kernels by name.")]
    n_trace_bytes: Annotated[Count, doc("Size of the trace.")]
    step_s: Annotated[Amount, doc("Mean of a profiled step.")]
    by_kind: Annotated[
        tuple[KernelKind, ...], Meta(min_length=1, description="All kernels, longest kind first.")
    ]
    kernels: Annotated[
        tuple[SortedKernel, ...], Meta(min_length=1, description="The longest kernels.")
    ]
    trace: Annotated[str, doc("Chrome trace, gzipped.")]


class UsedStaging(Record, frozen=True, kw_only=True):
    """Where training read from on its machine."""

    weights: Annotated[Staged, doc("The base model's weights.")]
    rows: Annotated[Staged | None, doc("The packed rows; none if it tokenized on the fly.")] = None


class Staging(Staged, frozen=True, kw_only=True):
    """Where stage_to_nvme chose to read rows from (and weights, under that key), and why."""

    expert: Annotated[str, doc("Name of the expert.")]
    weights: Annotated[Staged, doc("The same for the base model's weights.")]
    used: Measured[UsedStaging]

    @property
    def notes(self) -> tuple[Staged, ...]:
        """What training read from; as planned, if it recorded nothing."""
        rows, weights = (self.used.rows, self.used.weights) if self.used else (self, self.weights)
        return (rows, weights) if rows else (weights,)


class ChainLink(Record, frozen=True, kw_only=True):
    """A stage of the chain, from the note next to its record."""

    stage: Annotated[str, doc("Rule that made the record.")]
    record: Annotated[str, doc("Its path; for many shards, the pattern.")]
    sha256: Annotated[str, doc("Hash of the record; for many, of their hashes.")]
    code: Annotated[str, doc("Digest of the stage's code.")]


# A Struct, because a Record forbids unknown keys.
class Provenance(Struct, frozen=True, kw_only=True):
    """What this report was made from; further keys are allowed."""

    git: Annotated[Measured[str], doc("Commit of the workflow.")]
    lockfile_sha256: Annotated[Measured[str], doc("Hash of the pinned environment.")]
    input_sha256: Annotated[dict[str, str], doc("Hash of every record that was read.")]
    driver: Annotated[Measured[str], doc("Driver of the card.")]
    torch: Annotated[Measured[str], doc("Release of torch.")]
    command: Annotated[Measured[str], doc("Command that reproduces this.")]
    host_hash: Annotated[Measured[str], doc("Distinguishes machines without naming them.")]
    fingerprint: Annotated[str, doc("Everything that decides the weights.")]
    documents_sha256: Annotated[str, doc("Hash of the documents kept.")]
    packing_sha256: Annotated[str, doc("Hash of the packed rows.")]
    tokenizer_sha256: Annotated[str, doc("Hash of the tokenizer.")]
    weights_sha256: Annotated[str, doc("Hash of the trained weights.")]
    versions: Annotated[dict[str, str], doc("Releases of the trainer's packages.")]
    chain: tuple[ChainLink, ...]


class Verdict(Record, frozen=True, kw_only=True):
    """The run in one sentence."""

    level: Annotated[Literal["good", "mixed", "bad"], doc("Color of the answer.")]
    learned: Annotated[Learned, doc("Beyond the 95 % interval.")]
    answer: Annotated[str, doc("Did it learn?")]
    sentence: Annotated[str, doc("What supports the answer.")]


class Report(Record, frozen=True, kw_only=True):
    """Where the time and money of a training run went, and what the model learned."""

    schema_version: Annotated[Literal[2], doc("Incremented when a path changes its meaning.")]
    run: rr.Run
    model: rr.Model
    data: rr.Data
    training_parameters: rr.TrainingParameters
    training_report: rr.TrainingReport
    time: rr.Time
    throughput: rr.Throughput
    cost: rr.Cost
    bill: Annotated[Measured[rr.Bill], doc("The entire run; null if jobs ran by hand.")]
    plan: rr.PlanForecast
    evaluation: Evaluation
    staging: Staging
    profile: Annotated[Measured[Profile], doc("Null if no step was profiled.")]
    export: ExportRecord
    comparison: Annotated[
        tuple[AblationRecord, ...], doc("One ablation, or none; it has the reasons for its nulls.")
    ]
    provenance: Provenance
    plan_against_actual: tuple[rr.PlanRow, ...]
    unavailable: Annotated[
        dict[str, Annotated[str, Meta(min_length=1)]],
        doc("Dotted path of every null that could have been measured, and why it was not."),
    ]
    bottleneck: Bottleneck
    findings: tuple[Finding, ...]
    acceptance: tuple[AcceptanceVerdict, ...]
    verdict: Verdict
