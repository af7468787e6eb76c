"""Made-up documents, in memory and as files of the data stages."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from support import pair

from expertflow.data.documents import KEEP, Document, DocumentWriter, NewDocument
from expertflow.data.records import ShardRecord
from expertflow.data.shapes import frame_of
from expertflow.evaluate.records import Decoding, EvaluationSpec, Example, JudgeSpec, Judgment
from expertflow.evaluate.scoring import ScoringTask
from expertflow.tokens.ragged import Ragged
from expertflow.tokens.records import PackedSplit
from expertflow.train.records import KeptWeights


class Letters:
    """An engine with an id for each character."""

    name, version, sha256 = "letters", "0", ""

    def encode_flat(self, texts: list[str]) -> Ragged:
        return Ragged.from_lists([[ord(c) for c in text] for text in texts])

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def special_id(self, token: str) -> int:
        return {"<|im_start|>": 1, "<|im_end|>": 2, "<|endoftext|>": 3}[token]


def document(row: int, question: str, answer: str = "", *, held_out: bool = True) -> Document:
    return Document(
        document_id=f"s/{row}",
        text_hash=f"{question} {answer}".encode().hex(),
        body=pair(question, answer or question.upper()),
        fields={},
        held_out=held_out,
        n_copies=1,
        row=row,
    )


def example(number: int, prompt: str, reference: str) -> Example:
    return Example(document_id=f"d{number}", prompt=prompt, reference=reference, fields={})


def training(losses: Mapping[int, float | None], *, published: int, **more: str) -> Any:
    """Stand for a training that kept steps with these held-out losses."""
    candidates = tuple(
        KeptWeights(
            step=step, held_out_loss=loss, weights_sha256=f"w{step}",
            path="." if step == published else f"steps/step-{step:08d}",
        )
        for step, loss in losses.items()
    )  # fmt: skip
    return SimpleNamespace(candidates=candidates, published_step=published, **more)


def spec(**changes: Any) -> EvaluationSpec:
    settings: dict[str, Any] = {
        "task": "exact_match", "max_examples": 4, "n_selection_examples": 0, "max_new_tokens": 8,
        "batch_size": 2, "decoding": Decoding(),
    }  # fmt: skip
    return EvaluationSpec(**{**settings, **changes})


def judge_spec(endpoint: str = "http://127.0.0.1", **changes: Any) -> JudgeSpec:
    settings: dict[str, Any] = {
        "model": "stub", "api_key_env": None, "criterion": "Which answer is more correct?",
        "n_examples": 50, "max_tokens": 64, "timeout_s": 60.0,
        "usd_per_million_input_tokens": 2.0, "usd_per_million_output_tokens": 10.0,
    }  # fmt: skip
    return JudgeSpec(endpoint=endpoint, **(settings | changes))


def write_documents(folder: Path, documents: Sequence[Document], *, n_copies: int = 1) -> Path:
    """Write a shard, its record and the keep list; return the list's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "000.arrow"
    with pa.OSFile(str(path), "wb") as stream:
        writer = DocumentWriter(stream, None)
        for one in documents:
            text_hash = bytes.fromhex(one.text_hash)[:16].ljust(16, b"\0")
            writer.add(
                NewDocument(one.document_id, text_hash, one.row, None, *frame_of(one.body), b"{}")
            )
        writer.close()
    columns = {
        "source": ["s"] * len(documents), "shard": ["000"] * len(documents),
        "row": list(range(len(documents))), "held_out": [one.held_out for one in documents],
        "n_copies": [1 if one.held_out else n_copies for one in documents],
    }  # fmt: skip
    keep = folder / "keep.arrow"
    with pa.OSFile(str(keep), "wb") as sink, pa.ipc.new_stream(sink, KEEP) as stream:
        stream.write_batch(pa.RecordBatch.from_pydict(columns, schema=KEEP))
    return keep


def shard(folder: Path, n: int) -> ShardRecord:
    return ShardRecord(
        source="s", shard="000", path=str(folder / "000.arrow"), sha256="", n_records=n,
        n_documents=n, n_bytes=0, n_rejected_by_reason={}, n_filtered_by_reason={},
        rejected_examples=(),
    )  # fmt: skip


def packed_split(n_documents: int, sha256: str) -> PackedSplit:
    return PackedSplit(
        path="", sha256=sha256, n_documents=n_documents, n_documents_split=0,
        n_documents_truncated=0, n_documents_dropped=0, n_tokens_in=0, n_tokens=0,
        n_tokens_dropped=0, n_supervised_tokens=0, n_target_tokens=0, n_padding_tokens=0,
        n_sequences=0, n_sequences_lower_bound=0, sum_len_sq=0,
    )  # fmt: skip


def score(
    task: type[ScoringTask],
    answers: Sequence[str],
    reference: str = "",
    *,
    artifacts: Mapping[str, Path] | None = None,
    attributes: Mapping[str, Any] | None = None,
    **record: Any,
) -> list[Judgment]:
    """Judge answers to one record, whose fields are named like the task's arguments."""
    files = {name: str(path) for name, path in (artifacts or {}).items()}
    made = task(spec(fields={name: name for name in record}, artifacts=files))
    for name, value in (attributes or {}).items():
        setattr(made, name, value)
    example = Example(document_id="d7", prompt="?", reference=reference, fields=record)
    return made.score([example] * len(answers), answers)
