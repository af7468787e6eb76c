"""What both models answered: all of it as a file, some of it for the report."""

import json
import math
from itertools import zip_longest
from pathlib import Path

from expertflow.core.files import write_text
from expertflow.evaluate.ask import Held
from expertflow.evaluate.expert_sides import Outcome
from expertflow.evaluate.records import EvaluationSample

N_SAMPLES = 12
N_WORST = 10


def write_answers(path: Path, asked: list[Held], before: Outcome, after: Outcome) -> None:
    """Write all reported questions with both answers and verdicts, one JSON object a line.

    Empty where no answers were asked for. Losses are nats a token of the reference.
    """
    lines = [
        {
            "document_id": held.example.document_id,
            "prompt": held.example.prompt,
            "reference": held.example.reference,
            **_told("before", before, i),
            **_told("after", after, i),
        }
        for i, held in enumerate(asked[: len(after.verdicts)])
    ]
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def samples(asked: list[Held], before: Outcome, after: Outcome) -> tuple[EvaluationSample, ...]:
    """Show some questions: right and wrong answers in turn, as long as there are both."""
    right = [i for i, verdict in enumerate(after.verdicts) if verdict.correct]
    wrong = [i for i, verdict in enumerate(after.verdicts) if not verdict.correct]
    in_turn = [i for pair in zip_longest(right, wrong) for i in pair if i is not None]
    return tuple(_sample(asked, before, after, i) for i in in_turn[:N_SAMPLES])


def worst(asked: list[Held], before: Outcome, after: Outcome) -> tuple[EvaluationSample, ...]:
    """Show what went wrong: answers that were right before, then the references least expected.

    References whose loss is unknown come last.
    """

    def place(i: int) -> tuple[bool, bool, float]:
        loss = _known(after.reference_losses[i])
        return not before.verdicts[i].correct, loss is None, -(loss or 0.0)

    wrong = [i for i, verdict in enumerate(after.verdicts) if not verdict.correct]
    wrong.sort(key=place)
    return tuple(_sample(asked, before, after, i) for i in wrong[:N_WORST])


def _told(name: str, outcome: Outcome, i: int) -> dict[str, str | float | None]:
    return {
        name: outcome.texts[i],
        f"{name}_kind": outcome.verdicts[i].kind,
        f"{name}_detail": outcome.verdicts[i].detail,
        f"{name}_reference_loss": _known(outcome.reference_losses[i]),
    }


def _sample(asked: list[Held], before: Outcome, after: Outcome, i: int) -> EvaluationSample:
    example = asked[i].example
    return EvaluationSample(
        document_id=example.document_id,
        prompt=example.prompt,
        reference=example.reference,
        before=before.texts[i],
        after=after.texts[i],
        kind_before=before.verdicts[i].kind,
        kind_after=after.verdicts[i].kind,
        detail_after=after.verdicts[i].detail,
        reference_loss=_known(after.reference_losses[i]),
    )


def _known(loss: float) -> float | None:
    """Give a loss; null where the model has no position for all of the reference."""
    return loss if math.isfinite(loss) else None
