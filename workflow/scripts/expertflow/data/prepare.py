"""Validate and render one shard of a source into documents.

Reads the source's files, writes one Arrow file of documents, one JSONL file of rejects with file,
position and reason, and a record with counts and the hash of the documents.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from expertflow.core.errors import DataError
from expertflow.core.files import replacing, sha256_file, sha256_text, write_text
from expertflow.data.read import RawRecord, iter_shard
from expertflow.data.records import PrepareSpec, ShardPlan, ShardRecord, SourceRecord
from expertflow.data.render import Reject, plain_text, question_text, render, segments_to_rows

SEGMENT = pa.struct(
    [
        ("text", pa.string()),
        ("special", pa.bool_()),
        ("supervised", pa.bool_()),
        ("n_header_chars", pa.int32()),
    ]
)
# One row a document. `text_hash` is equal for equal documents; `group_hash` for documents that must
# stay on the same side of the train / held-out split; `fields` is JSON for the task's scorer.
DOCUMENTS = pa.schema(
    [
        ("document_id", pa.string()),
        ("text_hash", pa.string()),
        ("group_hash", pa.string()),
        ("segments", pa.list_(SEGMENT)),
        ("fields", pa.string()),
    ]
)
BATCH_DOCUMENTS = 2000


@dataclass(slots=True)
class Rejects:
    """Rejected records of a shard: counted by reason, each with its place."""

    counts: Counter[str]
    lines: list[str]

    def add(self, record: RawRecord, reason: str, detail: str) -> None:
        """Note one rejected record."""
        self.counts[reason] += 1
        self.lines.append(json.dumps({"where": record.where, "reason": reason, "detail": detail}))


def prepare_shard(
    *, spec: PrepareSpec, source: SourceRecord, plan: ShardPlan, output: Path, rejected: Path
) -> ShardRecord:
    """Prepare one shard and write its documents and rejects.

    Raises:
        DataError: more than ``max_rejected_fraction`` of the records were rejected.
    """
    rejects = Rejects(Counter(), [])
    n_records = n_documents = 0
    with replacing(output) as partial, pa.OSFile(str(partial), "wb") as sink:
        with pa.ipc.new_stream(sink, DOCUMENTS) as writer:
            rows: list[dict[str, Any]] = []
            for raw in iter_shard(source.files, index=plan.index, n_shards=plan.n_shards):
                if not _wanted(raw, spec.source.where):
                    continue
                n_records += 1
                row = _document(raw, spec, rejects)
                if row is not None:
                    rows.append(row)
                    n_documents += 1
                if len(rows) == BATCH_DOCUMENTS:
                    writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=DOCUMENTS))
                    rows = []
            if rows:
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=DOCUMENTS))
    write_text(rejected, "".join(line + "\n" for line in rejects.lines))
    _check_rejects(rejects, n_records, spec, rejected)
    return ShardRecord(
        source=plan.source,
        shard=plan.shard,
        path=str(output),
        sha256=sha256_file(output),
        n_records=n_records,
        n_documents=n_documents,
        n_bytes=output.stat().st_size,
        n_rejected_by_reason=dict(sorted(rejects.counts.items())),
    )


def _wanted(raw: RawRecord, where: dict[str, Any]) -> bool:
    """Keep records whose fields equal ``where``; unreadable ones stay, to be counted."""
    return raw.value is None or all(raw.value.get(k) == v for k, v in where.items())


def _document(raw: RawRecord, spec: PrepareSpec, rejects: Rejects) -> dict[str, Any] | None:
    """Make one row of the documents table, or note why there is none."""
    if raw.value is None:
        rejects.add(raw, str(raw.problem), "")
        return None
    try:
        segments = render(raw.value, spec)
        fields = _evaluation_fields(raw.value, spec.evaluation_fields)
    except Reject as reject:
        rejects.add(raw, reject.reason, reject.detail)
        return None
    text = plain_text(segments)
    is_chat = spec.source.text is None
    group = raw.value.get(spec.source.group) if spec.source.group else None
    group_text = str(group) if group is not None else question_text(segments) if is_chat else text
    return {
        "document_id": f"{spec.source.name}/{raw.value.get('id', raw.position)}",
        "text_hash": sha256_text(text),
        "group_hash": sha256_text(group_text),
        "segments": segments_to_rows(segments),
        "fields": json.dumps(fields, ensure_ascii=False),
    }


def _evaluation_fields(record: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    for name in names:
        if name not in record:
            raise Reject("missing_field", f"field {name!r}, which evaluation needs")
    return {name: record[name] for name in names}


def _check_rejects(rejects: Rejects, n_records: int, spec: PrepareSpec, path: Path) -> None:
    n_rejected = sum(rejects.counts.values())
    if n_rejected > spec.max_rejected_fraction * n_records:
        reason, n = rejects.counts.most_common(1)[0]
        raise DataError(
            f"source {spec.source.name}: {n_rejected} of {n_records} records rejected, most for"
            f" {reason!r} ({n}), e.g. {rejects.lines[0]}; mend the data or the template, or raise"
            f" data.max_rejected_fraction ({spec.max_rejected_fraction})"
        )
