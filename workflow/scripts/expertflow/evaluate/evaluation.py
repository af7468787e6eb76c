"""Score an expert before and after training, on held-out documents."""

import json
import logging
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from msgspec import field
from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.files import write_text
from expertflow.core.records import Record
from expertflow.data.documents import Document
from expertflow.evaluate import earlier, lm_eval_hook
from expertflow.evaluate.baselines import BaselinePredictor, make_baselines
from expertflow.evaluate.choose_checkpoint import (
    check_weights,
    choose_best,
    explain_no_choice,
    order_candidates,
    publish_trained,
)
from expertflow.evaluate.evaluator import EvalInputs, ModelEvaluator, ModelOutcome
from expertflow.evaluate.judge.comparison import JudgedPair, judge_pairs
from expertflow.evaluate.leakage import check_trained_rows, read_split
from expertflow.evaluate.questions import EvalExample, Questions, choose_questions, make_examples
from expertflow.evaluate.records import (
    BaselineScore,
    EvaluationRecord,
    EvaluationSample,
    EvaluationSpec,
    Example,
    JudgeResult,
    Judgment,
    LmEvalScore,
    PairedChange,
    Published,
)
from expertflow.evaluate.scoring import ScoringTask
from expertflow.evaluate.statistics import NO_EXAMPLES, estimate_change, summarize_judgments

log = logging.getLogger(__name__)
N_SAMPLES = 12
N_WORST = 10


def evaluate_expert(inputs: EvalInputs) -> EvaluationRecord:
    """Evaluate the base model, the candidates and the best of them, loading one at a time.

    Raises EvaluationError if a held-out document is also in the training data, the records are not
    of one run, or the task cannot be scored as configured.
    """
    start = time.perf_counter()
    spec, training, expert = inputs.spec, inputs.training, inputs.plan.expert
    check_trained_rows(expert, training=training, packing=inputs.packing, rows=inputs.rows)
    check_weights(training, inputs.checkpoint)
    split = read_split(expert, inputs.shards, inputs.keep, packing=inputs.packing, seed=spec.seed)
    evaluator = ModelEvaluator(inputs)
    questions = _questions(inputs, split.held_out, evaluator)
    asked = questions.reported
    before = evaluator.evaluate_model(None, asked)
    published = _published(inputs, evaluator, questions.selection)
    after = evaluator.evaluate_model(published.path, asked)
    evaluator.models.release()
    comparison = ModelComparison(evaluator, asked, before, after)
    memory, this = inputs.state / f"{expert}.jsonl", None
    if evaluator.metric is not None and after.judgments:
        said = [one.example for one in asked]
        weights = published.weights_sha256
        this = earlier.make_run(spec, evaluator.metric, weights, said, after.judgments)
    record = EvaluationRecord(
        expert=expert,
        task=spec.task_name,
        before=before.side,
        after=after.side,
        changes=comparison.estimate_changes(),
        published=published,
        baselines=comparison.score_baselines(make_examples(split.training, inputs.layout)),
        earlier=None if this is None else earlier.compare_runs(this, memory, seed=spec.seed),
        judge=comparison.ask_judge(),
        lm_eval=comparison.pair_harness(),
        decoding=spec.decoding,
        n_held_out_documents=len(split.held_out),
        n_documents_shared_with_training=0,
        n_questions_shared_with_training=split.n_shared_questions,
        n_unusable_references=len(questions.unusable),
        samples=comparison.pick_samples(),
        worst=comparison.pick_worst(),
        answers_path=str(inputs.answers_path),
        tools=evaluator.tool_versions(),
        unavailable={},
        wall_s=time.perf_counter() - start,
    )
    comparison.write_answers(inputs.answers_path)
    if this is not None:
        earlier.append_run(this, memory)
    return replace(record, unavailable=comparison.unavailable_parts(record, questions.unusable))


def _questions(
    inputs: EvalInputs, held_out: list[Document], evaluator: ModelEvaluator
) -> Questions:
    if evaluator.task is None:
        return Questions([], [], [])
    spec = inputs.spec
    if len(inputs.training.candidates) == 1:
        # Nothing to choose, so no questions are withheld.
        spec = replace(spec, n_selection_examples=0)
    return choose_questions(held_out, spec, evaluator.task, evaluator.codec)


def _published(
    inputs: EvalInputs, evaluator: ModelEvaluator, selection: list[EvalExample]
) -> Published:
    training, expert = inputs.training, inputs.plan.expert
    why = explain_no_choice(inputs.spec, training, len(selection), evaluator.unavailable_reason)
    if why is not None:
        log.info("%s: no choice among checkpoints: %s", expert, why)
        return publish_trained(training, why, by_loss=inputs.plan.load_best_model_at_end)
    scores = []
    # Training measures in other batches, so a table must not mix its losses with these.
    all_measured = all(one.held_out_loss is not None for one in training.candidates)
    for candidate in order_candidates(training):
        assert evaluator.metric is not None, "a choice without a metric"
        if not all_measured:
            # Training measured other steps, and the weights are loaded anyway.
            loss = evaluator.mean_loss(candidate.path)
            candidate = replace(candidate, held_out_loss=loss)
        judgments = evaluator.answer_questions(candidate.path, selection).judgments
        scores.append((candidate, summarize_judgments(evaluator.metric, judgments)))
        log.info("step %d: %d of %d", candidate.step, scores[-1][1].n_correct, len(selection))
    return choose_best(scores, len(selection))


class ModelComparison(Record, frozen=True):
    """Compares two models on the same questions; ``unavailable`` maps missing parts to reasons."""

    evaluator: ModelEvaluator
    asked: list[EvalExample]
    before: ModelOutcome
    after: ModelOutcome
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> EvaluationSpec:
        return self.evaluator.spec

    def estimate_changes(self) -> tuple[PairedChange, ...]:
        before, after = self.before.losses, self.after.losses
        n_D = before.n_targets_D
        there = n_D > 0
        loss = estimate_change(
            "held_out_loss",
            before.nats_D[there] / n_D[there],
            after.nats_D[there] / n_D[there],
            weights=n_D[there],
            higher_is_better=False,
            seed=self.spec.seed,
        )
        if self.evaluator.metric is None or not self.after.judgments:
            return (loss,)
        return (self._change_from(self.before.judgments), loss)

    def score_baselines(self, learnt_from: Sequence[Example]) -> tuple[BaselineScore, ...]:
        task = self.evaluator.task
        if not self.spec.baselines:
            return self._without("baselines", "evaluation.baselines is false")
        if task is None or not self.after.judgments:
            return self._without("baselines", self._no_answers())
        try:
            made = make_baselines(task.score, learnt_from, self.spec.seed)
        except EvaluationError as error:
            # Training data may be unscorable; the expert's own scores exist by now.
            log.warning("no baselines: %s", error)
            return self._without("baselines", f"a training document cannot be judged: {error}")
        if not made:
            return self._without("baselines", "too few training questions to learn one from")
        return tuple(self._score_baseline(task, one, len(learnt_from)) for one in made)

    def _score_baseline(
        self, task: ScoringTask, baseline: BaselinePredictor, n_learnt_from: int
    ) -> BaselineScore:
        asked = [one.example for one in self.asked]
        judgments = task.score(asked, [baseline.answer(example) for example in asked])
        score = summarize_judgments(task.metric, judgments)
        log.info("baseline %s: %d of %d", baseline.name, score.n_correct, score.n_examples)
        return BaselineScore(
            name=baseline.name,
            description=f"{baseline.description}; from {n_learnt_from:,} training documents",
            score=score,
            change=self._change_from(judgments),
        )

    def _change_from(self, judgments: Sequence[Judgment]) -> PairedChange:
        assert self.evaluator.metric is not None, "judgments without a metric"
        sides = ([one.correct for one in each] for each in (judgments, self.after.judgments))
        seed = self.spec.seed
        return estimate_change(self.evaluator.metric, *sides, higher_is_better=True, seed=seed)

    def pair_harness(self) -> tuple[LmEvalScore, ...]:
        if self.spec.lm_eval is None:
            return self._without("lm_eval", "evaluation.lm_eval is not set")
        if (why := lm_eval_hook.unavailable_reason()) is not None:
            return self._without("lm_eval", why)
        return tuple(lm_eval_hook.pair_scores(self.before.harness, self.after.harness))

    def ask_judge(self) -> JudgeResult | None:
        spec = self.spec
        if spec.judge is None or not self.after.judgments:
            unset = "evaluation.judge is not set"
            self._without("judge", unset if spec.judge is None else self._no_answers())
            return None
        asked = [one.example for one in self.asked]
        pairs = list(map(JudgedPair, asked, self.before.texts, self.after.texts))
        return judge_pairs(spec.judge, pairs, seed=spec.seed)

    def unavailable_parts(self, record: EvaluationRecord, unusable: list[str]) -> dict[str, str]:
        """Return why fields of the record are empty, by their paths in it."""
        found = dict(self.unavailable)
        side, earlier, published = record.before, record.earlier, record.published

        def both(why: str, *fields: str) -> None:
            for name in ("before", "after"):
                found.update({f"{name}.{field}": why for field in fields})

        if side.held_out_loss_ci95 is None:
            why = "a single held-out document has no interval"
            both(why, "held_out_loss_ci95", "perplexity_ci95")
        if side.score is None:
            both(f"task {record.task} has no metric beyond the held-out loss", "score")
        elif side.score.value_fraction is None:
            why = side.score.reason or self._no_answers()
            both(why, "score.value_fraction", "score.ci95")
        if side.generation_s is None:
            both(self._no_answers(), "generation_s", "n_generated_tokens", "n_cut_off")
        elif side.n_generated_tokens is None:
            why = "options are compared, nothing is generated"
            both(why, "n_generated_tokens", "n_cut_off")
        if unusable:
            found["n_unusable_references"] = unusable[0]
        if not published.candidates:
            found["published.candidates"] = published.reason
        if earlier is None:
            comparable = "no evaluation of other weights by the same task and decoding is on record"
            found["earlier"] = self._no_answers() if side.generation_s is None else comparable
        elif earlier.change is None:
            why = "the evaluation before asked none of these questions"
            found |= dict.fromkeys(("earlier.value_fraction", "earlier.change"), why)
        return found

    def write_answers(self, path: Path) -> None:
        """Write both answers to each question as JSON lines; losses in nats a token."""
        lines = []
        for i, one in enumerate(self.asked[: len(self.after.judgments)]):
            line: dict[str, str | float | None] = {
                "document_id": one.example.document_id,
                "prompt": one.example.prompt,
                "reference": one.example.reference,
            }
            for name, outcome in (("before", self.before), ("after", self.after)):
                line |= {
                    name: outcome.texts[i],
                    f"{name}_kind": outcome.judgments[i].kind,
                    f"{name}_detail": outcome.judgments[i].detail,
                    f"{name}_reference_loss": outcome.reference_losses[i],
                }
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_text(path, "".join(lines))

    def pick_samples(self) -> tuple[EvaluationSample, ...]:
        """Pick right and wrong answers alternately, as long as there are both."""
        right = [i for i, judgment in enumerate(self.after.judgments) if judgment.correct]
        in_turn = [i for pair in zip_longest(right, self._wrong()) for i in pair if i is not None]
        return tuple(map(self._sample, in_turn[:N_SAMPLES]))

    def pick_worst(self) -> tuple[EvaluationSample, ...]:
        """Pick wrong answers: right before first, then by descending loss, unknown losses last."""

        def place(i: int) -> tuple[bool, bool, float]:
            loss = self.after.reference_losses[i]
            return not self.before.judgments[i].correct, loss is None, -(loss or 0.0)

        return tuple(map(self._sample, sorted(self._wrong(), key=place)[:N_WORST]))

    def _wrong(self) -> list[int]:
        return [i for i, judgment in enumerate(self.after.judgments) if not judgment.correct]

    def _sample(self, i: int) -> EvaluationSample:
        example, before, after = self.asked[i].example, self.before, self.after
        return EvaluationSample(
            document_id=example.document_id,
            prompt=example.prompt,
            reference=example.reference,
            before=before.texts[i],
            after=after.texts[i],
            kind_before=before.judgments[i].kind,
            kind_after=after.judgments[i].kind,
            detail_after=after.judgments[i].detail,
            reference_loss=after.reference_losses[i],
        )

    def _no_answers(self) -> str:
        if self.evaluator.metric is None:
            return f"task {self.spec.task} generates nothing"
        return self.evaluator.unavailable_reason or NO_EXAMPLES

    def _without(self, name: str, why: str) -> tuple[()]:
        self.unavailable[name] = why
        return ()
