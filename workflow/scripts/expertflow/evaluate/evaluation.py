"""Score an expert before and after training, on held-out documents."""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from itertools import compress, zip_longest
from math import exp
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.files import write_text
from expertflow.core.progress import show_activity
from expertflow.core.records import Record, fill_record
from expertflow.data.documents import Document
from expertflow.data.records import Layout, ShardRecord
from expertflow.evaluate import earlier
from expertflow.evaluate.baselines import BaselinePredictor, make_baselines
from expertflow.evaluate.judge import JudgedPair, judge_pairs
from expertflow.evaluate.leakage import read_split
from expertflow.evaluate.questions import choose_recall, make_examples, reword
from expertflow.evaluate.records import (
    BaselineScore,
    EarlierRun,
    EvaluationRecord,
    EvaluationSample,
    EvaluationSide,
    EvaluationSpec,
    Example,
    GenerationRecord,
    JudgeResult,
    Judgment,
    ModelAnswers,
    PairedChange,
    RecallScore,
)
from expertflow.evaluate.scoring import ScoringTask, judge_answers, make_task, own_digest
from expertflow.evaluate.statistics import (
    NO_EXAMPLES,
    estimate_change,
    mean_interval,
    summarize_judgments,
)
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import ModelRecord

log = logging.getLogger(__name__)
N_SAMPLES = 12
N_WORST = 10
# exp() of more overflows.
LARGEST_LOSS = 700.0


class EvalInputs(Record, frozen=True, kw_only=True):
    """``state`` has earlier evaluations, ``answers`` is written, ``code`` is the stage's digest."""

    spec: EvaluationSpec
    generations: GenerationRecord
    shards: list[ShardRecord]
    packing: PackingRecord
    model: ModelRecord
    keep: Path
    state: Path
    answers: Path
    code: str


def evaluate_expert(inputs: EvalInputs) -> EvaluationRecord:
    """Score the answers of both models, and compare them with each other and the baselines.

    Raises EvaluationError if a held-out document is also in the training data, the records are from
    different runs, or the task cannot be scored as configured.
    """
    start = time.perf_counter()
    generations, layout = inputs.generations, inputs.model.tokenizer.layout
    expert, how = generations.expert, generations.spec
    split = read_split(expert, inputs.shards, inputs.keep, packing=inputs.packing, seed=how.seed)
    asked = _find_examples(split.held_out, generations.document_ids, layout)
    # A document from any other source is its own group.
    groups = {
        one.document_id: one.group
        if one.document_id.partition("/")[0] in inputs.spec.grouped_sources
        else one.document_id
        for one in split.held_out
    }
    comparison = ModelComparison(inputs.spec, generations, asked, groups)
    memory, this = inputs.state / f"{expert}.jsonl", None
    if comparison.metric is not None and comparison.after:
        weights = generations.published.weights_sha256
        # A stage whose code changed runs again, so earlier weights that still exist are rescored
        # and remain comparable.
        scorer = comparison.tool_versions() | {"code": inputs.code}
        this = earlier.make_run(how, comparison.metric, weights, asked, comparison.after, scorer)
    record = fill_record(
        EvaluationRecord,
        generations,
        how,
        task=how.task_name,
        before=comparison.describe_side(generations.before, comparison.before),
        after=comparison.describe_side(generations.after, comparison.after),
        changes=comparison.estimate_changes(),
        baselines=comparison.score_baselines(make_examples(split.training, layout)),
        earlier=None if this is None else comparison.compare_earlier(this, memory),
        judge=comparison.ask_judge(),
        n_held_out_documents=len(split.held_out),
        n_questions_shared_with_training=split.n_shared_questions,
        n_unusable_references=len(generations.unusable),
        recall=comparison.score_recall(inputs),
        samples=comparison.pick_samples(),
        worst=comparison.pick_worst(),
        answers_path=str(inputs.answers),
        tools=comparison.tool_versions(),
        unavailable={},
        wall_s=generations.wall_s + time.perf_counter() - start,
    )
    comparison.write_answers(inputs.answers)
    if this is not None:
        earlier.append_run(this, memory)
    return replace(record, unavailable=comparison.unavailable_parts(record))


def _find_examples(
    held_out: Iterable[Document], document_ids: Sequence[str], layout: Layout
) -> list[Example]:
    by_id = {document.document_id: document for document in held_out}
    if missing := [one for one in document_ids if one not in by_id]:
        raise EvaluationError(
            f"document {missing[0]}: was asked but is not held out; run generate_answers again"
        )
    return make_examples((by_id[one] for one in document_ids), layout)


def _perplexity(loss: float) -> float:
    return exp(min(loss, LARGEST_LOSS))


class ModelComparison:
    """Compares two models on the same questions.

    ``task`` is null if nothing is scored; ``unavailable_reason`` says why, if it has a metric.
    ``groups`` maps all held-out documents, in order, to their groups; ``unavailable`` maps missing
    parts to reasons.
    """

    def __init__(
        self,
        spec: EvaluationSpec,
        generations: GenerationRecord,
        asked: list[Example],
        groups: dict[str, int | str],
    ) -> None:
        how, reason = generations.spec, generations.unavailable_reason
        task = make_task(how)
        if task is not None and reason is None and (reason := task.unavailable_reason()):
            log.warning("%s: nothing is scored: %s", generations.expert, reason)
        self.spec, self.generations, self.seed = spec, generations, how.seed
        self.asked, self.groups = asked, [groups[one.document_id] for one in asked]
        # Losses end with the last document that has any.
        self.groups_D = list(groups.values())[: len(generations.before.nats)]
        self.metric = None if task is None else task.metric
        self.task, self.unavailable_reason = task if reason is None else None, reason
        self.unavailable: dict[str, str] = {}
        self.before, self.after = map(self._judge, (generations.before, generations.after))

    def _judge(self, answers: ModelAnswers) -> list[Judgment]:
        task, n = self.task, len(self.asked)
        with show_activity(lambda: f"scoring {n:,} answers"):
            return judge_answers(task, self.asked, answers) if task and answers.texts else []

    def describe_side(self, answers: ModelAnswers, judgments: list[Judgment]) -> EvaluationSide:
        nats_D, n_targets_D = np.array(answers.nats), np.array(answers.n_targets)
        loss = float(nats_D.sum() / n_targets_D.sum())
        ci95 = mean_interval(nats_D, n_targets_D, self.seed, self.groups_D)
        empty = self.unavailable_reason or NO_EXAMPLES
        return fill_record(
            EvaluationSide,
            answers,
            held_out_loss=loss,
            held_out_loss_ci95=ci95,
            perplexity=_perplexity(loss),
            perplexity_ci95=None if ci95 is None else (_perplexity(ci95[0]), _perplexity(ci95[1])),
            n_target_tokens=int(n_targets_D.sum()),
            n_documents=int((n_targets_D > 0).sum()),
            score=None
            if self.metric is None
            else summarize_judgments(self.metric, judgments, empty, self.groups),
        )

    def tool_versions(self) -> dict[str, str]:
        how = self.generations.spec
        digest = own_digest(how)
        own = {} if digest is None else {how.task_name: f"sha256:{digest}"}
        return {**self.task.tool_versions(), **own} if self.task else own

    def estimate_changes(self) -> tuple[PairedChange, ...]:
        before, after = self.generations.before, self.generations.after
        before_D, after_D, n_D = map(np.array, (before.nats, after.nats, before.n_targets))
        has_loss = n_D > 0  # without a target there is no loss
        loss = estimate_change(
            "held_out_loss",
            before_D[has_loss] / n_D[has_loss],
            after_D[has_loss] / n_D[has_loss],
            weights=n_D[has_loss],
            groups=list(compress(self.groups_D, has_loss)),
            higher_is_better=False,
            seed=self.seed,
        )
        if self.metric is None or not self.after:
            return (loss,)
        return (self._change_from(self.before), loss)

    def score_baselines(self, learned_from: Sequence[Example]) -> tuple[BaselineScore, ...]:
        task = self.task
        if not self.spec.baselines:
            return self._without("baselines", "evaluation.baselines is false")
        if task is None or not self.after:
            return self._without("baselines", self._no_answers())
        try:
            made = make_baselines(task.score, learned_from, self.seed)
        except EvaluationError as error:
            # Training data may be unscorable; the expert's own scores exist by now.
            log.warning("no baselines: %s", error)
            return self._without("baselines", f"a training document cannot be judged: {error}")
        if not made:
            return self._without("baselines", "too few training questions to learn one from")
        return tuple(self._score_baseline(task, one, len(learned_from)) for one in made)

    def _score_baseline(
        self, task: ScoringTask, baseline: BaselinePredictor, n_learned_from: int
    ) -> BaselineScore:
        with show_activity(lambda: f"baseline {baseline.name}"):
            # One call for all answers, because each call of score may start a process.
            answers = [baseline.answer(example) for example in self.asked]
            judgments = task.score(self.asked, answers)
        score = summarize_judgments(task.metric, judgments, groups=self.groups)
        log.info("baseline %s: %d of %d", baseline.name, score.n_correct, score.n_examples)
        return BaselineScore(
            name=baseline.name,
            description=f"{baseline.description}; from {n_learned_from:,} training documents",
            score=score,
            change=self._change_from(judgments),
        )

    def _change_from(self, judgments: Sequence[Judgment]) -> PairedChange:
        assert self.metric is not None, "judgments without a metric"
        sides = ([one.correct for one in each] for each in (judgments, self.after))
        return estimate_change(
            self.metric, *sides, groups=self.groups, higher_is_better=True, seed=self.seed
        )

    def score_recall(self, inputs: EvalInputs) -> tuple[RecallScore, ...]:
        """Score the answers to each wording of questions on what was trained."""
        how, task = self.generations.spec, self.task
        if not how.n_recall_examples:
            return ()
        if task is None:
            return self._without("recall", self._no_answers())
        documents = choose_recall(inputs.shards, inputs.keep, how)
        by_id, found = {document.document_id: document for document in documents}, []
        for one in self.generations.recall:
            reworded = (reword(by_id[name], one.wording) for name in one.document_ids)
            examples = make_examples(reworded, inputs.model.tokenizer.layout)
            score = summarize_judgments(task.metric, judge_answers(task, examples, one.answers))
            found.append(RecallScore(wording=one.wording, score=score))
        return tuple(found)

    def compare_earlier(self, run: earlier.PastRun, memory: Path) -> EarlierRun | None:
        hashes = (earlier.hash_question(self.generations.spec, one) for one in self.asked)
        groups = dict(zip(hashes, self.groups, strict=True))
        return earlier.compare_runs(run, memory, seed=self.seed, groups=groups)

    def ask_judge(self) -> JudgeResult | None:
        spec = self.spec
        if spec.judge is None or not self.after:
            unset = "evaluation.judge is not set"
            self._without("judge", unset if spec.judge is None else self._no_answers())
            return None
        before, after = self.generations.before, self.generations.after
        pairs = map(JudgedPair, self.asked, before.texts, after.texts)
        # Without answers there is nothing to prefer, and no tie either.
        answered = [one for one in pairs if one.example.document_id not in after.not_asked]
        return judge_pairs(spec.judge, answered, seed=self.seed)

    def unavailable_parts(self, record: EvaluationRecord) -> dict[str, str]:
        """Return why fields of the record are empty, by their paths in it."""
        found, generations = dict(self.unavailable), self.generations
        if generations.lm_eval_unavailable is not None:
            found["lm_eval"] = generations.lm_eval_unavailable
        side, earlier, published = record.before, record.earlier, record.published

        def both(why: str, *fields: str) -> None:
            for name in ("before", "after"):
                found.update({f"{name}.{field}": why for field in fields})

        if side.held_out_loss_ci95 is None:
            why = "fewer than six held-out documents, or groups of them, give no interval"
            both(why, "held_out_loss_ci95", "perplexity_ci95")
        if side.score is None:
            both(f"task {record.task} has no metric beyond the held-out loss", "score")
        elif side.score.value_fraction is None:
            why = side.score.reason or self._no_answers()
            both(why, "score.value_fraction", "score.ci95")
        if side.n_cut_off is None:
            why = "options are compared, nothing is generated"
            both(why if self.after else self._no_answers(), "n_cut_off")
        if generations.unusable:
            found["n_unusable_references"] = generations.unusable[0]
        if not published.candidates:
            found["published.candidates"] = published.reason
        if earlier is None:
            none = "no earlier evaluation of other weights has the same task, decoding and scorer"
            found["earlier"] = none if self.after else self._no_answers()
        elif earlier.change is None:
            why = "the earlier evaluation asked none of these questions"
            found |= dict.fromkeys(("earlier.value_fraction", "earlier.change"), why)
        return found

    def write_answers(self, path: Path) -> None:
        """Write both answers to each question as JSON lines; losses in nats per token."""
        lines = []
        for i, one in enumerate(self.asked[: len(self.after)]):
            line: dict[str, str | float | None] = {
                "document_id": one.document_id,
                "prompt": one.prompt,
                "reference": one.reference,
            }
            for name in ("before", "after"):
                answers, judgment = getattr(self.generations, name), getattr(self, name)[i]
                line |= {
                    name: answers.texts[i],
                    f"{name}_kind": judgment.kind,
                    f"{name}_detail": judgment.detail,
                    f"{name}_reference_loss": answers.reference_losses[i],
                }
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_text(path, "".join(lines))

    def pick_samples(self) -> tuple[EvaluationSample, ...]:
        """Pick right and wrong answers alternately, as long as there are both."""
        right = [i for i, judgment in enumerate(self.after) if judgment.correct]
        # Taken in turn: right, wrong, right, …
        in_turn = [i for pair in zip_longest(right, self._wrong()) for i in pair if i is not None]
        return tuple(map(self._sample, in_turn[:N_SAMPLES]))

    def pick_worst(self) -> tuple[EvaluationSample, ...]:
        """Pick wrong answers: those right before first, then by descending loss, unknown last."""

        def place(i: int) -> tuple[bool, bool, float]:
            loss = self.generations.after.reference_losses[i]
            return not self.before[i].correct, loss is None, -(loss or 0.0)

        return tuple(map(self._sample, sorted(self._wrong(), key=place)[:N_WORST]))

    def _wrong(self) -> list[int]:
        return [i for i, judgment in enumerate(self.after) if not judgment.correct]

    def _sample(self, i: int) -> EvaluationSample:
        before, after = self.generations.before, self.generations.after
        return fill_record(
            EvaluationSample,
            self.asked[i],
            before=before.texts[i],
            after=after.texts[i],
            kind_before=self.before[i].kind,
            kind_after=self.after[i].kind,
            detail_after=self.after[i].detail,
        )

    def _no_answers(self) -> str:
        if self.metric is None:
            return f"task {self.generations.spec.task} generates nothing"
        return self.unavailable_reason or NO_EXAMPLES

    def _without(self, name: str, why: str) -> tuple[()]:
        self.unavailable[name] = why
        return ()
