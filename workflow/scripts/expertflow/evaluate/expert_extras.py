"""What an evaluation compares the expert with besides its base, and what else is measured."""

import logging
from collections.abc import Sequence
from pathlib import Path

from expertflow.core.errors import EvaluationError
from expertflow.data.documents import Document
from expertflow.data.records import Layout
from expertflow.evaluate import lm_eval_hook
from expertflow.evaluate.ask import Held, examples
from expertflow.evaluate.baselines.answering import Baseline, make_baselines
from expertflow.evaluate.expert_models import Place
from expertflow.evaluate.expert_sides import Asker, Outcome
from expertflow.evaluate.judge.comparison import JudgedPair, judge_pairs
from expertflow.evaluate.records import (
    BaselineScore,
    EvaluationRecord,
    JudgeResult,
    LmEvalScore,
    PairedChange,
    Verdict,
)
from expertflow.evaluate.scores import summarise
from expertflow.evaluate.statistics import paired_change

log = logging.getLogger(__name__)


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
