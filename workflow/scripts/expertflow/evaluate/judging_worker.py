"""Judge predictions; started by ``judging`` as a process of its own, never imported for running."""

import json
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started isolated, it does not find the project by itself
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.apart.serving import serve
from expertflow.evaluate.records import Verdict


def _json_schema() -> Callable[..., Verdict]:
    from expertflow.evaluate.structured import judge_json

    return judge_json


def _typescript() -> Callable[..., Verdict]:
    from expertflow.evaluate.typescript.syntax import judge_typescript

    return judge_typescript


def _cypher() -> Callable[..., Verdict]:
    from expertflow.evaluate.cypher.scorer import judge_cypher

    return judge_cypher


# Imported on demand: a parser of another language would only cost time.
JUDGES = {"json_schema": _json_schema, "typescript": _typescript, "cypher": _cypher}


def answer_one(pipe: "Connection[Any, Any]", texts: dict[str, Any]) -> None:
    """Say how one prediction was judged, or why its record is ``unusable``."""
    judge = JUDGES[texts.pop("judge")]()
    try:
        verdict = judge(**texts)
        said = [verdict.kind, verdict.detail]
    except EvaluationError as error:
        said = ["unusable", str(error)]
    except MemoryError:
        said = ["timed_out", "ran out of memory"]
    pipe.send_bytes(json.dumps(said).encode("ascii"))


if __name__ == "__main__":
    serve(answer_one, **json.loads(sys.argv[2]))
