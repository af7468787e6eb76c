"""Records of an evaluation: the model before and after training, on held-out documents."""

from pathlib import PurePath
from typing import Literal

from msgspec import field

from expertflow.core.records import Record
from expertflow.data.records import Fields

# The task without a scorer.
HELD_OUT_LOSS = "held_out_loss"
# Among the artifacts: a user's file that defines the task.
OWN_TASK = "own_task"
Change = Literal["better", "worse", "no measurable change"]


class Decoding(Record, frozen=True, kw_only=True):
    """Decoding settings for the evaluation and the exported expert.

    ``temperature`` 0 is greedy; ``top_k`` 0 keeps all tokens; ``stop`` texts end an answer, as the
    end of the turn does, and are not part of it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


class JudgeSpec(Record, frozen=True, kw_only=True):
    """A model behind an OpenAI-compatible endpoint that compares answers before and after.

    The key is read from the environment variable ``api_key_env`` and never written anywhere.
    """

    endpoint: str
    model: str
    api_key_env: str | None
    criterion: str
    n_examples: int
    max_tokens: int
    timeout_s: float
    usd_per_million_input_tokens: float | None
    usd_per_million_output_tokens: float | None


def redact_address(endpoint: str) -> str:
    """Return an address without user, query and fragment, which is safe to record."""
    address = endpoint.partition("?")[0].partition("#")[0]
    scheme, found, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{found}{host.rpartition('@')[2]}{slash}{path}".rstrip("/")


LM_EVAL_FILES = (".yaml", ".yml")


class LmEvalSpec(Record, frozen=True, kw_only=True):
    tasks: tuple[str, ...]
    n_shots: int
    limit: int | None


class GenerationSpec(Record, frozen=True, kw_only=True):
    """Settings of ``generate_answers``, which scoring reads from its record.

    ``task`` is a name, or a user's file as written in the manifest; its path is the artifact
    ``OWN_TASK``. ``fields`` maps the task's arguments to record fields (for ``sql_execution``:
    ``database``), ``artifacts`` names to files; ``content`` has the hashes of files that the
    workflow does not create. ``n_selection_examples`` questions, separate from the reported ones,
    choose among the kept checkpoints; 0 takes the one that training published.
    ``n_recall_examples`` training documents are asked too, verbatim and reworded by ``rephrase``.
    """

    task: str
    max_examples: int
    n_selection_examples: int
    max_new_tokens: int
    batch_size: int
    decoding: Decoding
    allow_code_execution: bool = False
    lm_eval: LmEvalSpec | None = None
    n_recall_examples: int = 0
    rephrase: str | None = None
    fields: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    content: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def task_name(self) -> str:
        return PurePath(self.task).name


class EvaluationSpec(Record, frozen=True, kw_only=True):
    """Settings of ``evaluate_expert``; ``grouped_sources`` are those with a ``group``."""

    grouped_sources: tuple[str, ...] = ()
    baselines: bool = True
    judge: JudgeSpec | None = None


class Example(Record, frozen=True, kw_only=True):
    document_id: str
    prompt: str
    reference: str
    fields: Fields


class Judgment(Record, frozen=True):
    """The judgment of one answer. ``kind`` is ``correct`` or the kind of error."""

    kind: str
    detail: str = ""

    @property
    def correct(self) -> bool:
        return self.kind == "correct"


class TaskScore(Record, frozen=True, kw_only=True):
    metric: str
    n_examples: int
    n_correct: int
    value_fraction: float | None
    ci95: tuple[float, float] | None
    n_by_kind: dict[str, int]
    reason: str | None = None


class EvaluationSide(Record, frozen=True, kw_only=True):
    """One model, before or after training.

    Intervals of loss (nats per target) and perplexity are 95 % bootstrap intervals over documents
    or their groups, null for fewer than six.
    """

    held_out_loss: float
    held_out_loss_ci95: tuple[float, float] | None
    perplexity: float
    perplexity_ci95: tuple[float, float] | None
    n_target_tokens: int
    n_documents: int
    score: TaskScore | None
    n_cut_off: int | None


class PairedChange(Record, frozen=True, kw_only=True):
    """One side minus the other on the same ``n`` questions or documents, by paired bootstrap.

    ``change`` says that nothing measurable changed if the interval includes zero, or fewer than six
    pairs or groups differ. Lower is better for a loss, higher for a metric.
    """

    quantity: str
    difference: float
    ci95: tuple[float, float]
    n: int
    change: Change


class CandidateScore(Record, frozen=True, kw_only=True):
    """A kept checkpoint's score on the selection questions. ``published`` marks the chosen one."""

    step: int
    held_out_loss: float
    score: TaskScore
    published: bool


class Published(Record, frozen=True, kw_only=True):
    """The exported weights: their step, where they are, and why they were chosen.

    ``candidates`` were asked ``n_questions`` questions that the reported scores exclude; they are
    empty if there was nothing to choose, and ``reason`` says why.
    """

    step: int
    path: str
    weights_sha256: str
    reason: str
    n_questions: int = 0
    candidates: tuple[CandidateScore, ...] = ()


class BaselineScore(Record, frozen=True, kw_only=True):
    """The score of a baseline without a model. ``change`` is the expert minus the baseline."""

    name: str
    description: str
    score: TaskScore
    change: PairedChange


class EarlierRun(Record, frozen=True, kw_only=True):
    """The newest earlier evaluation of other weights with the same task, decoding and scorer.

    ``n_shared_questions`` of its questions were asked again: ``value_fraction`` is its score on
    these, ``change`` this run minus that one. Both are null without shared questions.
    """

    evaluated_at: str
    weights_sha256: str
    n_shared_questions: int
    value_fraction: float | None
    change: PairedChange | None


class JudgeResult(Record, frozen=True, kw_only=True):
    """Pairwise verdicts of a judge, which saw each pair twice, with positions swapped.

    A verdict counts only if both orders agree; otherwise it is a tie and also counts in
    ``n_inconsistent``. ``win_fraction`` is wins of the expert plus half of the ties, over all pairs
    except failed ones; ``ci95`` is the Wilson interval of the decided pairs with the ties added.
    Equal answers are a tie without being sent. ``reason`` says why pairs failed.
    """

    model: str
    endpoint: str
    n_pairs: int
    n_wins: int
    n_losses: int
    n_ties: int
    n_inconsistent: int
    n_failed: int
    win_fraction: float | None
    ci95: tuple[float, float] | None
    n_input_tokens: int | None
    n_output_tokens: int | None
    usd: float | None
    wall_s: float
    reason: str | None = None


class LmEvalScore(Record, frozen=True, kw_only=True):
    task: str
    metric: str
    before: float | None
    after: float | None
    before_stderr: float | None
    after_stderr: float | None


class ModelAnswers(Record, frozen=True, kw_only=True):
    """What one model computed, by document and by question.

    ``nats`` and ``n_targets`` are sums of each held-out document; ``reference_losses`` are nats per
    token on each question's reference, null where it exceeds the model's positions. ``not_asked``
    maps document ids to the reason why they were not asked.
    """

    nats: tuple[float, ...] = ()
    n_targets: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    reference_losses: tuple[float | None, ...] = ()
    not_asked: dict[str, str] = field(default_factory=dict)
    n_cut_off: int | None = None


class RecallAnswers(Record, frozen=True, kw_only=True):
    """The expert's answers to questions that it was trained on, in one wording."""

    wording: str
    document_ids: tuple[str, ...]
    answers: ModelAnswers


class RecallScore(Record, frozen=True, kw_only=True):
    wording: str
    score: TaskScore


class GenerationRecord(Record, frozen=True, kw_only=True):
    """Answers of the base model and the expert to the questions of ``document_ids``, in order.

    ``unavailable_reason`` says why nothing was generated although the task has a metric;
    ``unusable`` says why questions with unjudgeable references were not asked.
    """

    expert: str
    spec: GenerationSpec
    document_ids: tuple[str, ...]
    unusable: tuple[str, ...]
    unavailable_reason: str | None
    published: Published
    before: ModelAnswers
    after: ModelAnswers
    lm_eval: tuple[LmEvalScore, ...]
    lm_eval_unavailable: str | None
    wall_s: float
    recall: tuple[RecallAnswers, ...] = ()


class EvaluationSample(Record, frozen=True, kw_only=True):
    """One question in the report."""

    document_id: str
    prompt: str
    reference: str
    before: str
    after: str
    kind_before: str
    kind_after: str
    detail_after: str = ""


class EvaluationRecord(Record, frozen=True, kw_only=True):
    """Results before and after training, on documents verified to be held out.

    ``n_questions_shared_with_training`` held-out documents have a question that training answers
    differently. ``n_unusable_references`` questions were not asked because their references cannot
    be judged. ``changes`` compare after with before. ``tools`` are versions of scoring tools;
    ``unavailable`` says why a part is missing. ``samples`` alternate right and wrong
    answers; ``worst`` are wrong ones, those right before first, then by loss.
    """

    expert: str
    task: str
    before: EvaluationSide
    after: EvaluationSide
    changes: tuple[PairedChange, ...]
    published: Published
    baselines: tuple[BaselineScore, ...]
    earlier: EarlierRun | None
    judge: JudgeResult | None
    lm_eval: tuple[LmEvalScore, ...]
    decoding: Decoding
    n_held_out_documents: int
    n_questions_shared_with_training: int
    n_unusable_references: int = 0
    recall: tuple[RecallScore, ...] = ()
    samples: tuple[EvaluationSample, ...]
    worst: tuple[EvaluationSample, ...]
    answers_path: str
    tools: dict[str, str]
    unavailable: dict[str, str]
    wall_s: float
