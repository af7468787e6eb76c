"""Set the answers of both models side by side: for the record, the report and answers.jsonl."""

import json
import logging
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from expertflow.core.errors import EvaluationError
from expertflow.core.files import write_text
from expertflow.data.documents import Document
from expertflow.data.records import Layout
from expertflow.evaluate import lm_eval_hook
from expertflow.evaluate.baselines import BaselinePredictor, make_baselines
from expertflow.evaluate.evaluator import ModelEvaluator, ModelOutcome
from expertflow.evaluate.judge.comparison import JudgedPair, judge_pairs
from expertflow.evaluate.questions import EvalExample, examples
from expertflow.evaluate.records import (
    BaselineScore,
    EvaluationRecord,
    EvaluationSample,
    JudgeResult,
    LmEvalScore,
    PairedChange,
    Verdict,
)
from expertflow.evaluate.statistics import NO_EXAMPLES, paired_change, summarise

log = logging.getLogger(__name__)
N_SAMPLES = 12
N_WORST = 10


class ModelComparison:
    """Compares two models on the same questions; ``unavailable`` says what was left out and why."""

    def __init__(
        self,
        evaluator: ModelEvaluator,
        asked: list[EvalExample],
        before: ModelOutcome,
        after: ModelOutcome,
    ) -> None:
        self.evaluator, self.spec = evaluator, evaluator.spec
        self.asked, self.before, self.after = asked, before, after
        self.unavailable: dict[str, str] = {}

    def changes(self) -> tuple[PairedChange, ...]:
        before, after = self.before.losses, self.after.losses
        n_D = before.n_targets_D
        there = n_D > 0
        loss = paired_change(
            "held_out_loss",
            before.nats_D[there] / n_D[there],
            after.nats_D[there] / n_D[there],
            weights=n_D[there],
            higher_is_better=False,
            seed=self.spec.seed,
        )
        if self.evaluator.metric is None or not self.after.verdicts:
            return (loss,)
        return (self._change_from(self.before.verdicts), loss)

    def baselines(self, training: Sequence[Document], layout: Layout) -> tuple[BaselineScore, ...]:
        if not self.spec.baselines:
            return self._without("baselines", "evaluation.baselines is false")
        if not self.after.verdicts:
            return self._without("baselines", self._no_answers())
        learnt_from = examples(training, layout)
        try:
            made = make_baselines(self.evaluator.judge, learnt_from, self.spec.seed)
        except EvaluationError as error:
            # Training data may hold what no scorer takes; the expert's own scores are there by now.
            log.warning("no baselines: %s", error)
            return self._without("baselines", f"a training document cannot be judged: {error}")
        if not made:
            return self._without("baselines", "too few training questions to learn one from")
        return tuple(self._score_baseline(one, len(learnt_from)) for one in made)

    def harness(self) -> tuple[LmEvalScore, ...]:
        if self.spec.lm_eval is None:
            return self._without("lm_eval", "evaluation.lm_eval is not set")
        if (why := lm_eval_hook.unavailable_reason()) is not None:
            return self._without("lm_eval", why)
        return tuple(lm_eval_hook.paired(self.before.harness, self.after.harness))

    def judged(self) -> JudgeResult | None:
        spec = self.spec
        if spec.judge is None or not self.after.verdicts:
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
        """Write both answers to each question, one JSON object a line; losses in nats a token."""
        lines = []
        for i, one in enumerate(self.asked[: len(self.after.verdicts)]):
            line: dict[str, str | float | None] = {
                "document_id": one.example.document_id,
                "prompt": one.example.prompt,
                "reference": one.example.reference,
            }
            for name, outcome in (("before", self.before), ("after", self.after)):
                line |= {
                    name: outcome.texts[i],
                    f"{name}_kind": outcome.verdicts[i].kind,
                    f"{name}_detail": outcome.verdicts[i].detail,
                    f"{name}_reference_loss": outcome.reference_losses[i],
                }
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_text(path, "".join(lines))

    def samples(self) -> tuple[EvaluationSample, ...]:
        """Choose some questions: right and wrong answers in turn, as long as there are both."""
        right = [i for i, verdict in enumerate(self.after.verdicts) if verdict.correct]
        in_turn = [i for pair in zip_longest(right, self._wrong()) for i in pair if i is not None]
        return tuple(map(self._sample, in_turn[:N_SAMPLES]))

    def worst(self) -> tuple[EvaluationSample, ...]:
        """Choose wrong answers: right before, then least expected; unknown losses come last."""

        def place(i: int) -> tuple[bool, bool, float]:
            loss = self.after.reference_losses[i]
            return not self.before.verdicts[i].correct, loss is None, -(loss or 0.0)

        return tuple(map(self._sample, sorted(self._wrong(), key=place)[:N_WORST]))

    def _wrong(self) -> list[int]:
        return [i for i, verdict in enumerate(self.after.verdicts) if not verdict.correct]

    def _sample(self, i: int) -> EvaluationSample:
        example, before, after = self.asked[i].example, self.before, self.after
        return EvaluationSample(
            document_id=example.document_id,
            prompt=example.prompt,
            reference=example.reference,
            before=before.texts[i],
            after=after.texts[i],
            kind_before=before.verdicts[i].kind,
            kind_after=after.verdicts[i].kind,
            detail_after=after.verdicts[i].detail,
            reference_loss=after.reference_losses[i],
        )

    def _score_baseline(self, baseline: BaselinePredictor, n_learnt_from: int) -> BaselineScore:
        assert self.evaluator.metric is not None, "a baseline without a metric"
        asked = [one.example for one in self.asked]
        verdicts = self.evaluator.judge(asked, [baseline.answer(example) for example in asked])
        score = summarise(self.evaluator.metric, verdicts)
        log.info("baseline %s: %d of %d", baseline.name, score.n_correct, score.n_examples)
        return BaselineScore(
            name=baseline.name,
            description=f"{baseline.description}; from {n_learnt_from:,} training documents",
            score=score,
            change=self._change_from(verdicts),
        )

    def _change_from(self, verdicts: Sequence[Verdict]) -> PairedChange:
        assert self.evaluator.metric is not None, "verdicts without a metric"
        return paired_change(
            self.evaluator.metric,
            [verdict.correct for verdict in verdicts],
            [verdict.correct for verdict in self.after.verdicts],
            higher_is_better=True,
            seed=self.spec.seed,
        )

    def _no_answers(self) -> str:
        if self.evaluator.metric is None:
            return f"task {self.spec.task} generates nothing"
        return self.evaluator.unavailable_reason or NO_EXAMPLES

    def _without(self, name: str, why: str) -> tuple[()]:
        self.unavailable[name] = why
        return ()
