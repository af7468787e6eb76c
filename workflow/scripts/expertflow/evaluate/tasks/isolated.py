"""Tasks that are judged in a process with limits: a parser or a pattern may take forever.

Some patterns of a schema are searched for without end, comparing thousands of unequal items takes
the square of their number, and no parser's error recovery promises a time. This file is also the
script of that process.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started isolated, it does not find the project by itself
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.isolation.worker import Reply, Worker, serve
from expertflow.evaluate.records import Verdict
from expertflow.evaluate.tasks.base import ScoringCase, ScoringTask

MEMORY_BYTES = 1 << 30


class IsolatedTask(ScoringTask):
    """A task whose module has a function ``judge`` of a prediction, a reference and other texts.

    The kinds of its verdicts are joined by ``timed_out``: it ran out of processor time or memory.
    """

    cpu_s = 10
    wall_s = 60.0

    def texts(self, case: ScoringCase) -> dict[str, str | None]:
        """Return what ``judge`` takes besides prediction and reference."""
        raise NotImplementedError

    def score(self, cases: Sequence[ScoringCase]) -> list[Verdict]:
        options = {"judge": type(self).__module__, "cpu_s": self.cpu_s}
        verdicts = []
        with closing(Worker(Path(__file__), options, wall_s=self.wall_s)) as worker:
            for case in cases:
                with case.located():
                    texts = {"reference": case.example.reference, **self.texts(case)}
                    worker.send({"prediction": case.prediction, **texts})
                    kind, detail = worker.receive()
                    if kind == "unusable":
                        raise EvaluationError(detail)
                    verdicts.append(Verdict(correct=kind == "correct", kind=kind, detail=detail))
        return verdicts


def main() -> None:
    options = json.loads(sys.argv[2])

    def answer(texts: dict[str, Any], reply: Reply) -> None:
        # Imported within the limits; a parser of another language would only cost time.
        judge = importlib.import_module(options["judge"]).judge
        try:
            verdict = judge(**texts)
        except EvaluationError as error:
            reply("unusable", str(error))
        except MemoryError:
            reply("timed_out", "ran out of memory")
        else:
            reply(verdict.kind, verdict.detail)

    serve(answer, memory_bytes=MEMORY_BYTES, cpu_s=options["cpu_s"])


if __name__ == "__main__":
    main()
