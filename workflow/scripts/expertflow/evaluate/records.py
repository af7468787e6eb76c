"""What evaluation says: the model before and after training, on documents it never saw."""

from dataclasses import dataclass, field
from typing import Any, Literal

Task = Literal[
    "held_out_loss",
    "sql_execution",
    "json_schema",
    "cypher",
    "typescript",
    "final_answer",
    "exact_match",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSpec:
    """Settings of ``evaluate_expert``.

    ``fields`` names the record fields a task reads, by the task's own argument names (for
    ``sql_execution``: ``database``); ``artefacts`` maps names to files; ``content`` holds the
    hashes of those that the workflow does not make.
    """

    task: Task
    max_examples: int
    max_new_tokens: int
    batch_size: int
    stop: tuple[str, ...]
    fields: dict[str, str] = field(default_factory=dict)
    artefacts: dict[str, str] = field(default_factory=dict)
    content: dict[str, str] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One held-out question: what the model sees, what it should say, and what scoring needs."""

    document_id: str
    prompt: str
    reference: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How one prediction was judged. ``kind`` is ``correct`` or the kind of error."""

    correct: bool
    kind: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """A task's metric over the held-out examples, with its 95 % Wilson interval."""

    metric: str
    n_examples: int
    n_correct: int
    value_fraction: float | None
    ci95: tuple[float, float] | None
    n_by_kind: dict[str, int]
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSide:
    """One model: the base model (before) or the expert (after)."""

    held_out_loss: float
    perplexity: float
    n_target_tokens: int
    score: TaskScore | None
    generation_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSample:
    """One example shown to the reader of the report."""

    document_id: str
    prompt: str
    reference: str
    before: str | None
    after: str | None
    kind_before: str | None
    kind_after: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """Before and after, on documents that training provably never saw.

    ``n_documents_shared_with_training`` is counted afresh from the split, and must be 0.
    """

    expert: str
    task: Task
    before: EvaluationSide
    after: EvaluationSide
    n_held_out_documents: int
    n_documents_shared_with_training: int
    samples: tuple[EvaluationSample, ...]
    wall_s: float
