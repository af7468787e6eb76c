"""Made-up documents, in memory and as files of the data stages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import document_shard, keep_list, pair

from expertflow.data.documents import Document
from expertflow.data.records import ShardRecord
from expertflow.evaluate.isolation.sql_worker import Limits
from expertflow.evaluate.records import Decoding, Example, GenerationSpec, JudgeSpec, Judgment
from expertflow.evaluate.scoring import ScoringTask
from expertflow.evaluate.tasks.sql_execution import SqlExecution
from expertflow.tokens.ragged import Ragged
from expertflow.train.records import KeptWeights


class Letters:
    """An engine with one id per character."""

    name, version, sha256 = "letters", "0", ""

    def encode_flat(self, texts: list[str]) -> Ragged:
        return Ragged.from_lists([[ord(c) for c in text] for text in texts])

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def special_id(self, token: str) -> int:
        return {"<|im_start|>": 1, "<|im_end|>": 2, "<|endoftext|>": 3}[token]


def document(row: int, question: str, answer: str = "", *, held_out: bool = True) -> Document:
    return Document(
        document_id=f"s/{row}", text_hash=f"{question} {answer}".encode().hex(),
        body=pair(question, answer or question.upper()), fields={}, held_out=held_out, n_copies=1,
        row=row, group=row,
    )  # fmt: skip


def example(number: int | str, prompt: str, reference: str, **fields: Any) -> Example:
    return Example(document_id=f"d{number}", prompt=prompt, reference=reference, fields=fields)


def training(losses: Mapping[int, float | None], *, published: int, **more: str) -> Any:
    """Represent a training that kept steps with these held-out losses."""
    candidates = tuple(
        KeptWeights(
            step=step, held_out_loss=loss, weights_sha256=f"w{step}",
            path="." if step == published else f"steps/step-{step:08d}",
        )
        for step, loss in losses.items()
    )  # fmt: skip
    points = tuple(SimpleNamespace(step=step) for step in (0, *losses))
    return SimpleNamespace(
        candidates=candidates, published_step=published, eval_points=points, **more
    )


def spec(**changes: Any) -> GenerationSpec:
    settings: dict[str, Any] = {
        "task": "exact_match", "max_examples": 4, "n_selection_examples": 0, "max_new_tokens": 8,
        "batch_size": 2, "decoding": Decoding(),
    }  # fmt: skip
    return GenerationSpec(**{**settings, **changes})


def judge_spec(endpoint: str = "http://127.0.0.1", **changes: Any) -> JudgeSpec:
    settings: dict[str, Any] = {
        "model": "stub", "api_key_env": None, "criterion": "Which answer is more correct?",
        "n_examples": 50, "max_tokens": 64, "timeout_s": 60.0,
        "usd_per_million_input_tokens": 2.0, "usd_per_million_output_tokens": 10.0,
    }  # fmt: skip
    return JudgeSpec(endpoint=endpoint, **(settings | changes))


def write_documents(
    folder: Path, documents: Sequence[Document], *, n_copies: int = 1, **repeats: int
) -> tuple[ShardRecord, Path]:
    """Write documents, and record which of them are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = {"000": [one.held_out for one in documents]}
    shard = document_shard(folder, [one.body for one in documents], **repeats)
    return shard, keep_list(folder, held_out, n_copies=n_copies)


def packing(n_train: int, n_held_out: int, *, held_out_sha256: str = "h", **changes: Any) -> Any:
    """Represent the record of rows with this many documents."""
    return SimpleNamespace(
        train=SimpleNamespace(n_documents=n_train, sha256="t"),
        held_out=SimpleNamespace(n_documents=n_held_out, sha256=held_out_sha256),
        **{"n_dropped_by_reason": {}, "n_dropped_held_out": 0, **changes},
    )


def score(
    task: type[ScoringTask],
    answers: Sequence[str],
    reference: str | Sequence[str] = "",
    *,
    artifacts: Mapping[str, Path] | None = None,
    attributes: Mapping[str, Any] | None = None,
    **record: Any,
) -> list[Judgment]:
    """Judge answers to one reference or one each; fields are named like the task's arguments."""
    files = {name: str(path) for name, path in (artifacts or {}).items()}
    made = task(spec(fields={name: name for name in record}, artifacts=files))
    for name, value in (attributes or {}).items():
        setattr(made, name, value)
    references = [reference] * len(answers) if isinstance(reference, str) else reference
    return made.score([example(7, "?", one, **record) for one in references], answers)


@contextmanager
def one_sql_process(limits: Limits) -> Iterator[None]:
    """Run all queries with these limits in one process: starting it takes longer than a query."""
    own = SqlExecution.make_worker
    task = SqlExecution(spec())
    task.limits = limits
    with pytest.MonkeyPatch.context() as patch, closing(task.make_worker()) as worker:
        shared: Any = SimpleNamespace(ask=worker.ask, close=lambda: None)
        patch.setattr(
            SqlExecution, "make_worker", lambda task: shared if task.limits == limits else own(task)
        )
        yield
