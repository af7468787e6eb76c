"""Judge predictions in a process with limits: a parser or a pattern may take for ever.

Some patterns of a schema are searched for without end, comparing thousands of unequal items takes
the square of their number, and no parser's error recovery promises a time.
"""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from msgspec.structs import asdict

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.evaluate import judging_worker
from expertflow.evaluate.apart.worker import Worker
from expertflow.evaluate.records import Verdict


class Judged(Record, frozen=True, kw_only=True):
    """One prediction, and the further texts that its judge takes, by their names."""

    document_id: str
    prediction: str
    texts: dict[str, str | None]


class JudgingLimits(Record, frozen=True, kw_only=True):
    """What judging one prediction may use."""

    cpu_s: int = 10
    memory_bytes: int = 1 << 30


def judge_apart(
    judge: str, predictions: Iterable[Judged], *, cpu_s: int = 10, wall_s: float = 60.0
) -> list[Verdict]:
    """Judge by one of ``judging_worker.JUDGES``, in the order given.

    The judge's kinds are joined by ``timed_out``: it ran out of processor time or memory.

    Raises:
        EvaluationError: a reference cannot be used; names the document.
    """
    script = Path(judging_worker.__file__)
    with closing(Worker(script, asdict(JudgingLimits(cpu_s=cpu_s)), wall_s=wall_s)) as worker:
        return [_judge(judge, each, worker) for each in predictions]


def _judge(judge: str, judged: Judged, worker: Worker) -> Verdict:
    worker.send({**judged.texts, "judge": judge, "prediction": judged.prediction})
    kind, detail = worker.receive()
    if kind == "unusable":
        raise EvaluationError(f"document {judged.document_id}: {detail}")
    return Verdict(correct=kind == "correct", kind=kind, detail=detail)
