"""Score an expert before and after training, on documents that training never saw."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.data.documents import Document
from expertflow.data.records import Layout, ShardRecord
from expertflow.evaluate import earlier, lm_eval_hook
from expertflow.evaluate.answers import samples, worst, write_answers
from expertflow.evaluate.ask import Held, Questions, choose, examples
from expertflow.evaluate.baselines.answering import Baseline, make_baselines
from expertflow.evaluate.choose_checkpoint import (
    as_trained,
    check_there,
    chosen,
    in_order,
    no_choice,
)
from expertflow.evaluate.expert_sides import (
    Asker,
    Models,
    Outcome,
    Place,
    Speaker,
    metric_or_none,
)
from expertflow.evaluate.judge.comparison import JudgedPair, judge_pairs
from expertflow.evaluate.losses import DocumentLosses
from expertflow.evaluate.records import (
    BaselineScore,
    EvaluationRecord,
    EvaluationSpec,
    JudgeResult,
    LmEvalScore,
    PairedChange,
    Published,
    Verdict,
)
from expertflow.evaluate.references import Judgeable, judgeable
from expertflow.evaluate.statistics import paired_change, summarise
from expertflow.evaluate.tasks import hindrance, tools
from expertflow.evaluate.unseen import Unseen, check_trained_rows, read_unseen
from expertflow.plan.records import TrainPlan
from expertflow.tokens.arrow import read_rows
from expertflow.tokens.engine import Engine
from expertflow.tokens.records import PackingRecord
from expertflow.train.records import TrainingRecord

log = logging.getLogger(__name__)


class Case(Record, frozen=True, kw_only=True):
    """What is evaluated, and what it is evaluated on.

    ``load`` takes a folder of trained weights, or null for the base model.
    ``state`` is the folder of earlier evaluations.
    """

    spec: EvaluationSpec
    shards: list[ShardRecord]
    keep: Path
    packing: PackingRecord
    training: TrainingRecord
    rows: Path
    tokenizer: Path
    layout: Layout
    checkpoint: Path
    load: Callable[[Path | None], Any]
    plan: TrainPlan
    state: Path
    answers_path: Path

    @property
    def expert(self) -> str:
        """Give the expert's name."""
        return self.plan.expert


def evaluate_expert(case: Case) -> EvaluationRecord:
    """Ask the base model, the candidates and the best of them; one is loaded at a time.

    Raises:
        EvaluationError: a held-out document is also in the training data, the records are not of
            one run, or the task cannot be scored as the manifest asks.
    """
    start = time.perf_counter()
    spec, training = case.spec, case.training
    check_trained_rows(case.expert, training=training, packing=case.packing, rows=case.rows)
    check_there(training, case.checkpoint)
    unseen = read_unseen(case.expert, case.shards, case.keep, packing=case.packing, seed=spec.seed)
    asker = _asker(case)
    usable, questions = _questions(case, unseen, asker)
    before = _outcome(case, asker, None, questions.reported)
    harness = [run_harness(asker, None, case.tokenizer)]
    published = _published(case, asker, questions.selection)
    after = _outcome(case, asker, published.path, questions.reported)
    harness.append(run_harness(asker, published.path, case.tokenizer))
    asker.models.release()
    extras = Extras(asker, questions.reported, before, after)
    this = _noted(case, asker, questions.reported, after, published)
    memory = case.state / f"{case.expert}.jsonl"
    record = EvaluationRecord(
        expert=case.expert,
        task=spec.task,
        before=before.side,
        after=after.side,
        changes=changes(asker, before, after),
        published=published,
        baselines=extras.baselines(unseen.training, case.layout),
        earlier=None if this is None else earlier.compare(this, memory, seed=spec.seed),
        judge=extras.judged(),
        lm_eval=extras.harness(*harness),
        decoding=spec.decoding,
        n_held_out_documents=len(unseen.held_out),
        n_documents_shared_with_training=0,
        n_questions_shared_with_training=unseen.n_shared_questions,
        n_unusable_references=usable.n_unusable,
        samples=samples(questions.reported, before, after),
        worst=worst(questions.reported, before, after),
        answers_path=str(case.answers_path),
        tools=tools(spec) if asker.can_answer else {},
        unavailable={},
        wall_s=time.perf_counter() - start,
    )
    write_answers(case.answers_path, questions.reported, before, after)
    if this is not None:
        earlier.note(this, memory)
    return replace(record, unavailable=extras.unavailable | gaps(record, asker, usable.reason))


def _asker(case: Case) -> Asker:
    spec, metric = case.spec, metric_or_none(case.spec)
    hindered = None if metric is None else hindrance(spec)
    if hindered is not None:
        log.warning("%s: nothing is generated: %s", case.expert, hindered)
    return Asker(
        models=Models(case.load, case.checkpoint),
        spec=spec,
        speaker=Speaker(Engine(case.tokenizer), case.layout),
        held_out=read_rows(case.rows / "held_out"),
        micro_batch_size=case.plan.batch_size,
        metric=metric,
        hindrance=hindered,
    )


def _questions(case: Case, unseen: Unseen, asker: Asker) -> tuple[Judgeable, Questions]:
    """Choose the questions; those whose reference cannot be judged make room for others."""
    spec = case.spec
    if not asker.can_answer:
        return Judgeable(documents=[], n_unusable=0, reason=None), Questions([], [])
    if len(case.training.candidates) == 1:
        # There is nothing to choose, so none is kept back for it.
        spec = replace(spec, n_selection_examples=0)
    usable = judgeable(unseen.held_out, spec, case.layout, asker.judge)
    return usable, choose(usable.documents, spec, asker.speaker.engine, case.layout)


def _outcome(case: Case, asker: Asker, place: Place, asked: list[Held]) -> Outcome:
    """Ask one model. Pieces of a single document are no sample of documents: they are one."""
    found = asker.outcome(place, asked)
    if case.packing.held_out.n_documents != 1:
        return found
    losses = found.losses
    whole = DocumentLosses(losses.nats_D.sum(keepdims=True), losses.n_targets_D.sum(keepdims=True))
    side = replace(found.side, held_out_loss_ci95=None, perplexity_ci95=None, n_documents=1)
    return replace(found, losses=whole, side=side)


def _published(case: Case, asker: Asker, selection: list[Held]) -> Published:
    """Let the candidates answer the questions of the choice, where there is one."""
    training = case.training
    why = no_choice(case.spec, training, len(selection), asker.hindrance)
    if why is not None:
        log.info("%s: no choice among checkpoints: %s", case.expert, why)
        return as_trained(training, why, by_loss=case.plan.load_best_model_at_end)
    scores = []
    # Training and this measure in other batches: losses of one table are of one measurement.
    all_measured = all(one.held_out_loss is not None for one in training.candidates)
    for candidate in in_order(training):
        assert asker.metric is not None, "a choice without a metric"
        if not all_measured:
            # Training measures at its own steps; the weights were loaded anyway.
            loss = asker.held_out_loss(candidate.path)
            candidate = replace(candidate, held_out_loss=loss)
        verdicts = asker.said(candidate.path, selection).verdicts
        scores.append((candidate, summarise(asker.metric, verdicts)))
        log.info("step %d: %d of %d", candidate.step, scores[-1][1].n_correct, len(selection))
    return chosen(training, scores, len(selection))


def _noted(
    case: Case, asker: Asker, asked: list[Held], after: Outcome, published: Published
) -> earlier.Noted | None:
    """Sum up what later evaluations are compared with; null where no answers were asked for."""
    if asker.metric is None or not after.verdicts:
        return None
    how = earlier.Asked(
        task=case.spec.task,
        metric=asker.metric,
        max_new_tokens=case.spec.max_new_tokens,
        decoding=case.spec.decoding,
        fields=case.spec.fields,
        artefacts=earlier.hashes_of(case.spec.artefacts),
    )
    examples = [held.example for held in asked]
    return earlier.noted(how, published.weights_sha256, examples, after.verdicts)


def changes(asker: Asker, before: Outcome, after: Outcome) -> tuple[PairedChange, ...]:
    """Compare both sides by question and by held-out document."""
    found = []
    seed = asker.spec.seed
    if asker.metric is not None and after.verdicts:
        found.append(
            paired_change(
                asker.metric,
                correct(before.verdicts),
                correct(after.verdicts),
                higher_is_better=True,
                seed=seed,
            )
        )
    n_D = before.losses.n_targets_D
    there = n_D > 0
    found.append(
        paired_change(
            "held_out_loss",
            before.losses.nats_D[there] / n_D[there],
            after.losses.nats_D[there] / n_D[there],
            weights=n_D[there],
            higher_is_better=False,
            seed=seed,
        )
    )
    return tuple(found)


def correct(verdicts: Sequence[Verdict]) -> list[bool]:
    """Give which answers were right."""
    return [verdict.correct for verdict in verdicts]


def run_harness(asker: Asker, place: Place, tokenizer: Path) -> lm_eval_hook.Figures:
    """Run the tasks of lm-evaluation-harness on one model, if any are set and it is installed."""
    spec = asker.spec.lm_eval
    if spec is None:
        return {}
    if (why := lm_eval_hook.hindrance()) is not None:
        log.warning("evaluation.lm_eval: %s", why)
        return {}
    return lm_eval_hook.measure(
        asker.models.get(place), spec, tokenizer=tokenizer, batch_size=asker.spec.batch_size
    )


class Extras:
    """Comparisons that a setting asks for; what is left out is told in ``unavailable``."""

    def __init__(self, asker: Asker, asked: list[Held], before: Outcome, after: Outcome) -> None:
        self.asker, self.asked, self.before, self.after = asker, asked, before, after
        self.unavailable: dict[str, str] = {}

    def baselines(self, training: Sequence[Document], layout: Layout) -> tuple[BaselineScore, ...]:
        """Score answers without a model on the same questions."""
        if not self.asker.spec.baselines:
            return self._without("baselines", "evaluation.baselines is false")
        if not self.after.verdicts:
            return self._without("baselines", no_answers(self.asker))
        learnt_from = examples(training, layout)
        try:
            made = make_baselines(self.asker.judge, learnt_from, self.asker.spec.seed)
        except EvaluationError as error:
            # Training data may hold what no scorer takes; the expert's own scores are there by now.
            log.warning("no baselines: %s", error)
            return self._without("baselines", f"a training document cannot be judged: {error}")
        if not made:
            return self._without("baselines", "too few training questions to learn one from")
        return tuple(self._scored(one, len(learnt_from)) for one in made)

    def harness(
        self, before: lm_eval_hook.Figures, after: lm_eval_hook.Figures
    ) -> tuple[LmEvalScore, ...]:
        """Put what lm-evaluation-harness measured side by side."""
        if self.asker.spec.lm_eval is None:
            return self._without("lm_eval", "evaluation.lm_eval is not set")
        if (why := lm_eval_hook.hindrance()) is not None:
            return self._without("lm_eval", why)
        return tuple(lm_eval_hook.paired(before, after))

    def judged(self) -> JudgeResult | None:
        """Let a judge compare the answers of both sides."""
        spec = self.asker.spec
        if spec.judge is None or not self.after.verdicts:
            unset = "evaluation.judge is not set"
            self._without("judge", unset if spec.judge is None else no_answers(self.asker))
            return None
        texts = zip(self.asked, self.before.texts, self.after.texts, strict=True)
        pairs = [
            JudgedPair(
                prompt=held.example.prompt,
                reference=held.example.reference,
                before=before,
                after=after,
            )
            for held, before, after in texts
        ]
        return judge_pairs(spec.judge, pairs, seed=spec.seed)

    def _scored(self, baseline: Baseline, n_learnt_from: int) -> BaselineScore:
        asker, asked = self.asker, [held.example for held in self.asked]
        assert asker.metric is not None, "a baseline without a metric"
        verdicts = asker.judge(asked, [baseline.answer(example) for example in asked])
        score = summarise(asker.metric, verdicts)
        log.info("baseline %s: %d of %d", baseline.name, score.n_correct, score.n_examples)
        return BaselineScore(
            name=baseline.name,
            description=f"{baseline.description}; from {n_learnt_from:,} training documents",
            score=score,
            change=paired_change(
                asker.metric,
                correct(verdicts),
                correct(self.after.verdicts),
                higher_is_better=True,
                seed=asker.spec.seed,
            ),
        )

    def _without(self, name: str, why: str) -> tuple[()]:
        self.unavailable[name] = why
        return ()


def no_answers(asker: Asker) -> str:
    """Say why no answers were asked for."""
    if asker.metric is None:
        return f"task {asker.spec.task} generates nothing"
    return asker.hindrance or "no held-out examples to score"


def gaps(record: EvaluationRecord, asker: Asker, unusable: str | None = None) -> dict[str, str]:
    """Say why fields of the record are empty, by their paths in it; both sides have the same.

    ``unusable`` is the first reason why a reference cannot be judged.
    """
    found: dict[str, str] = {}
    side, earlier, published = record.before, record.earlier, record.published
    if side.held_out_loss_ci95 is None:
        why = "a single held-out document has no interval"
        found |= _both(why, "held_out_loss_ci95", "perplexity_ci95")
    if side.score is None:
        found |= _both(f"task {asker.spec.task} has no metric beyond the held-out loss", "score")
    elif side.score.value_fraction is None:
        why = side.score.reason or no_answers(asker)
        found |= _both(why, "score.value_fraction", "score.ci95")
    if side.generation_s is None:
        found |= _both(no_answers(asker), "generation_s", "n_generated_tokens", "n_cut_off")
    elif side.n_generated_tokens is None:
        found |= _both("options are compared, nothing is generated", "n_generated_tokens")
        found |= _both("options are compared, nothing is generated", "n_cut_off")
    if record.n_unusable_references and unusable is not None:
        found["n_unusable_references"] = unusable
    if not published.candidates:
        found["published.candidates"] = published.reason
    if earlier is None:
        comparable = "no evaluation of other weights by the same task and decoding is on record"
        found["earlier"] = no_answers(asker) if side.generation_s is None else comparable
    elif earlier.change is None:
        why = "the evaluation before asked none of these questions"
        found |= dict.fromkeys(("earlier.value_fraction", "earlier.change"), why)
    return found


def _both(why: str, *fields: str) -> dict[str, str]:
    return {f"{side}.{name}": why for side in ("before", "after") for name in fields}
