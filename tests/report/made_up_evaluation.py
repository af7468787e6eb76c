"""Evaluation records: one with every optional part, and one with none."""

import math

from msgspec.structs import replace

from expertflow.evaluate import records as e
from expertflow.evaluate.statistics import wilson_interval

PUBLISHED_STEP = 1200
N, N_SELECTION = 200, 100
METRIC = "execution_accuracy"
PROMPT = (
    "CREATE TABLE orders (id INTEGER, customer TEXT, total REAL, placed DATE);\n"
    "How much did each customer spend in 2024, highest first?"
)
REFERENCE = (
    "SELECT customer, SUM(total) AS spent FROM orders\n"
    "WHERE placed BETWEEN '2024-01-01' AND '2024-12-31'\n"
    "GROUP BY customer ORDER BY spent DESC;"
)
RIGHT = e.EvaluationSample(
    document_id="d1" * 8, prompt=PROMPT, reference=REFERENCE,
    before="SELECT * FROM orders orders orders", after=REFERENCE,
    kind_before="syntax_error", kind_after="correct",
)  # fmt: skip
WRONG = e.EvaluationSample(
    document_id="d2" * 8, prompt=PROMPT.replace("highest first", "lowest first"),
    reference=REFERENCE.replace("DESC", "ASC"), before="The table has four columns.",
    after=REFERENCE, kind_before="syntax_error", kind_after="wrong_result",
    detail_after="row 1 is ('Ada', 310.0), not ('Cy', 12.5)",
)  # fmt: skip
DESCRIPTIONS = {
    "constant": "gives the most common answer; from 4,000 training documents",
    "template": "fills in the most common form of answer; from 4,000 training documents",
    "nearest": "gives the answer of the most similar question; from 4,000 training documents",
}

REASONS = {
    "earlier": "no earlier evaluation of other weights has the same task, decoding and scorer",
    "judge": "evaluation.judge is not set",
}


def make_evaluation(
    *, before: tuple[int, float], after: tuple[int, float], baselines: dict[str, int]
) -> e.EvaluationRecord:
    """Make an evaluation with a task of 200 questions: (correct answers, loss) of both sides."""
    sides = side(*before), side(*after)
    gained = (after[0] - before[0]) / N
    return e.EvaluationRecord(
        expert="expert-sql", task="sql_execution", before=sides[0], after=sides[1],
        changes=(
            change("held_out_loss", after[1] - before[1], half=0.03, n=N),
            change(METRIC, gained, half=0.068, n=N),
        ),
        published=published(), baselines=tuple(
            baseline(name, n_correct, after[0]) for name, n_correct in baselines.items()
        ),
        earlier=None, judge=None, lm_eval=(),
        decoding=e.Decoding(stop=(";\n\n",)), n_held_out_documents=300,
        n_questions_shared_with_training=0,
        samples=(RIGHT, WRONG), worst=(WRONG,) * 10,
        answers_path="results/expert-sql/answers.jsonl", tools={"sqlite": "3.46.1"},
        unavailable=REASONS, wall_s=188.0, recall=(
            e.RecallScore(wording="{question}", score=sides[1].score),
            e.RecallScore(wording="Tell me: {question}", score=sides[0].score),
        ),
    )  # fmt: skip


def make_bare(*, before: float, after: float) -> e.EvaluationRecord:
    """Make an evaluation of an expert without a task: two losses and nothing else."""
    record = make_evaluation(before=(0, before), after=(0, after), baselines={})
    blank = dict.fromkeys(("score", "n_cut_off"))
    no_metric = "task held_out_loss has no metric beyond the held-out loss"
    return replace(
        record,
        task="held_out_loss",
        recall=(),
        before=replace(record.before, **blank),
        after=replace(record.after, **blank),
        changes=record.changes[:1],
        published=published_by_training(PUBLISHED_STEP),
        decoding=e.Decoding(),
        n_held_out_documents=N,
        samples=(),
        worst=(),
        tools={},
        unavailable=_with_reasons(no_metric, *blank),
        wall_s=31.0,
    )


def published_by_training(step: int) -> e.Published:
    return e.Published(
        step=step, path=".", weights_sha256="7c" * 32, reason="the weights that training published"
    )  # fmt: skip


def change(
    quantity: str, difference: float, *, half: float, n: int, word: e.Change | None = None
) -> e.PairedChange:
    """Make a change with its interval; the word follows from the interval unless it is given."""
    gain = -difference if quantity == "held_out_loss" else difference
    seen: e.Change = "better" if gain > 0 else "worse"
    return e.PairedChange(
        quantity=quantity, difference=difference, ci95=(difference - half, difference + half), n=n,
        change=word or ("no measurable change" if abs(difference) <= half else seen),
    )  # fmt: skip


def baseline(name: str, n_correct: int, n_correct_expert: int) -> e.BaselineScore:
    difference = (n_correct_expert - n_correct) / N
    return e.BaselineScore(
        name=name, description=DESCRIPTIONS[name], score=score(n_correct, N),
        change=change(METRIC, difference, half=0.05, n=N),
    )  # fmt: skip


def published() -> e.Published:
    """The second of three checkpoints: neither the last one nor that of the lowest loss."""
    kept = ((600, 52, 0.612), (1200, 64, 0.566), (1800, 60, 0.547))
    candidates = (
        e.CandidateScore(step=step, held_out_loss=loss, score=score(n_correct, N_SELECTION),
                         published=step == PUBLISHED_STEP)
        for step, n_correct, loss in kept
    )  # fmt: skip
    return e.Published(
        step=PUBLISHED_STEP, path="candidates/step-1200", weights_sha256="7c" * 32,
        n_questions=N_SELECTION, candidates=tuple(candidates),
        reason="the highest execution accuracy of 3 kept checkpoints",
    )  # fmt: skip


def earlier(difference: float, word: e.Change) -> e.EarlierRun:
    return e.EarlierRun(
        evaluated_at="2026-05-30T17:02:11Z", weights_sha256="6b" * 32, n_shared_questions=150,
        value_fraction=0.58, change=change(METRIC, difference, half=0.04, n=150, word=word),
    )  # fmt: skip


def judge(*, n_wins: int, n_losses: int, n_ties: int, n_inconsistent: int = 4) -> e.JudgeResult:
    n = n_wins + n_losses + n_ties
    won = (n_wins + n_ties / 2) / n
    return e.JudgeResult(
        model="judge-70b", endpoint="http://127.0.0.1:8000/v1", n_pairs=n + 1, n_wins=n_wins,
        n_losses=n_losses, n_ties=n_ties, n_inconsistent=n_inconsistent, n_failed=1,
        win_fraction=won, ci95=(max(0.0, won - 0.12), min(1.0, won + 0.12)), n_input_tokens=81_200,
        n_output_tokens=9_300, usd=0.11, wall_s=64.0, reason="no verdict in the reply",
    )  # fmt: skip


LM_EVAL = (
    e.LmEvalScore(task="arc_easy", metric="acc", before=0.561, after=0.548, before_stderr=0.0102,
                after_stderr=0.0103),
    e.LmEvalScore(task="wikitext", metric="word_perplexity", before=21.4, after=22.0,
                before_stderr=None, after_stderr=None),
)  # fmt: skip


def score(n_correct: int, n: int) -> e.TaskScore:
    wrong = n - n_correct
    kinds = {"correct": n_correct, "wrong_result": wrong - wrong // 5, "syntax_error": wrong // 5}
    return e.TaskScore(
        metric=METRIC, n_examples=n, n_correct=n_correct, value_fraction=n_correct / n,
        ci95=wilson_interval(n_correct, n), n_by_kind=kinds,
    )  # fmt: skip


def side(n_correct: int, loss: float) -> e.EvaluationSide:
    return e.EvaluationSide(
        held_out_loss=loss, held_out_loss_ci95=(loss * 0.97, loss * 1.03),
        perplexity=math.exp(loss), perplexity_ci95=(math.exp(loss * 0.97), math.exp(loss * 1.03)),
        n_target_tokens=161_000, n_documents=N, score=score(n_correct, N), n_cut_off=3,
    )  # fmt: skip


def not_scored(record: e.EvaluationRecord, reason: str) -> e.EvaluationRecord:
    """Make an evaluation whose task could not be scored, with that reason."""
    none = e.TaskScore(
        metric=METRIC, n_examples=0, n_correct=0, value_fraction=None, ci95=None, n_by_kind={},
        reason=reason,
    )  # fmt: skip
    sides = (replace(one, score=none, n_cut_off=None) for one in (record.before, record.after))
    before, after = sides
    return replace(
        record, before=before, after=after, changes=record.changes[:1], baselines=(), samples=(),
        worst=(), earlier=None,
        unavailable=_with_reasons(reason, "score.value_fraction", "score.ci95", "n_cut_off"),
    )  # fmt: skip


def _with_reasons(why: str, *fields: str) -> dict[str, str]:
    """Return the reasons of a record, with this one for some fields of both sides."""
    return REASONS | {f"{name}.{field}": why for name in ("before", "after") for field in fields}
