"""Turn one shard of a source's records into documents, and count every outcome.

Each record passes, in order: the manifest's ``where``, field checks, e-mail pseudonyms, template,
secret scanner, benchmark overlap. Rejects go to ``rejected.jsonl`` with file, line and field.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow as pa
from msgspec import Struct, field

from expertflow.core.errors import DataError
from expertflow.core.files import replacing, sha256_file
from expertflow.data.checks.registry import build_checks
from expertflow.data.documents import (
    DocumentWriter,
    NewDocument,
    group_hash,
    hash_document,
    normalized,
    text_hash,
)
from expertflow.data.messages import without_padding
from expertflow.data.read import iter_shard
from expertflow.data.records import ShardPlan, ShardRecord, SourceRecord
from expertflow.data.reject import (
    Filtered,
    RawRecord,
    Reject,
    describe,
    reject_line,
    without_data,
)
from expertflow.data.secrets import find_secrets, replace_emails
from expertflow.data.settings import PrepareSpec, category_name
from expertflow.data.shapes import MISSING, Draft, draft_maker, look_up, missing_field, text_field

log = logging.getLogger(__name__)

N_EXAMPLES = 3
# This many rejects in a shard are worth a warning before the source is judged.
N_MANY = 1000


class Outcome(Struct):
    stream: IO[str]
    n_records: int = 0
    n_documents: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, raw: RawRecord, preparer: "Preparer", writer: DocumentWriter) -> None:
        try:
            if raw.value is None:
                assert raw.fault is not None
                self.n_records += 1
                raise raw.fault
            if not preparer.wanted(raw.value):
                return
            self.n_records += 1
            writer.add(preparer.document(raw, raw.value))
            self.n_documents += 1
        except Reject as found:
            reject = without_data(raw, found) if preparer.private else found
            self.stream.write(reject_line(raw, reject) + "\n")
            if isinstance(reject, Filtered):
                self.filtered[reject.reason] += 1
                return
            self.rejected[reject.reason] += 1
            if len(self.examples) < N_EXAMPLES:
                self.examples.append(describe(raw, reject))
            if self.rejected.total() == N_MANY:
                log.warning("%d records are rejected so far; first: %s", N_MANY, self.examples[0])
            if preparer.spec.on_reject == "stop":
                raise DataError(
                    f"source {preparer.source.name}: {describe(raw, reject)}; mend the record, or"
                    " set data.on_reject to skip"
                ) from (None if preparer.private else found)


class Preparer:
    def __init__(self, spec: PrepareSpec) -> None:
        self.spec, self.source = spec, spec.source
        self._draft: Callable[[Mapping[str, Any]], Draft] = draft_maker(spec)
        self._check = build_checks(spec.source.checks, source=spec.source.name)
        self._find_overlap: Callable[[Sequence[str]], str | None] | None = None
        self._sign: Callable[[str], bytes] | None = None
        # Load only what is needed: a job should start at once.
        if spec.benchmarks:
            from expertflow.data.leaks import BenchmarkIndex

            self._find_overlap = BenchmarkIndex.read(spec.benchmarks).find
        if spec.near is not None:
            from expertflow.data.near import Signer

            self._sign = Signer(spec.near).signature
        # What is kept out of documents must not appear in logs or rejects either.
        self.private = spec.source.scan_secrets or spec.source.pseudonymize_emails

    def wanted(self, record: Mapping[str, Any]) -> bool:
        where = self.source.where
        return not where or all(record.get(key) == value for key, value in where.items())

    def document(self, raw: RawRecord, record: dict[str, Any]) -> NewDocument:
        """Make a document; raise Reject for a faulty record, Filtered for an unwanted document."""
        record = self._check(record)
        if self.source.pseudonymize_emails:
            record = without_emails(record)
        if raw.unit == "row" and self.source.messages is not None:
            record = without_padding(record, self.source)
        draft = self._draft(record)
        if self.source.scan_secrets and (kinds := find_secrets("\n".join(draft.texts))):
            raise Filtered("secret", f"it holds {', '.join(kinds)}")
        if self._find_overlap and (path := self._find_overlap(draft.texts)) is not None:
            raise Filtered("in_benchmark", f"it shares words with {path}")
        texts = [normalized(text) for text in draft.texts]
        n_given = draft.n_given or len(texts)
        given, answer = "\n".join(texts[:n_given]), "\n".join(texts[n_given:])
        group, text = hash_document(given, answer)
        if draft.group is not None:
            group = group_hash(normalized(draft.group))
        if self.source.group is not None:
            value = look_up(record, self.source.group)
            if not isinstance(value, str | int | float):
                raise Reject(
                    "no_group", "the group's field holds no value", field=self.source.group
                )
            group = group_hash(str(value))
        # Documents with the same identity are duplicates.
        identity = f"{given}\n{answer}"
        if names := self.source.duplicate_fields:
            fields = (normalized(text_field(record, name)).casefold() for name in names)
            identity = "\n".join(fields)
            text = text_hash(identity)
        return NewDocument(
            self._id(raw, record),
            text,
            group,
            None if self.source.category is None else self._category(record),
            draft.frame,
            draft.contents,
            self._fields(record) if self.spec.evaluation_fields else b"{}",
            self._sign(identity) if self._sign else None,
        )

    def _id(self, raw: RawRecord, record: Mapping[str, Any]) -> str:
        own = record.get("id")
        if type(own) is not str and type(own) is not int:
            own = f"{raw.path.rpartition('/')[2]}:{raw.number}"
        return f"{self.source.name}/{own}"

    def _category(self, record: Mapping[str, Any]) -> str | None:
        name = str(self.source.category)
        value = look_up(record, name)
        if value is MISSING:
            raise missing_field(record, name)
        return category_name(value) if isinstance(value, str | int | float) else None

    def _fields(self, record: Mapping[str, Any]) -> bytes:
        for name in self.spec.evaluation_fields:
            if name not in record:
                raise missing_field(record, name)
        try:
            return orjson.dumps({name: record[name] for name in self.spec.evaluation_fields})
        except TypeError as error:
            raise Reject("not_json", f"a field for evaluation: {error}") from error


def prepare_shard(
    *, spec: PrepareSpec, source: SourceRecord, plan: ShardPlan, output: Path, rejected: Path
) -> ShardRecord:
    """Write a shard's documents and rejects; DataError if the manifest stops at the first one.

    The reject limit applies per source, independent of the number of shards; the rejects remain.
    """
    preparer = Preparer(spec)
    with (
        replacing(output) as partial,
        replacing(rejected) as rejected_partial,
        pa.OSFile(str(partial), "wb") as sink,
        rejected_partial.open("w", encoding="utf-8") as stream,
    ):
        outcome = Outcome(stream)
        writer = DocumentWriter(sink, spec.near)
        options = spec.source.options
        for raw in iter_shard(
            source.files, index=plan.index, n_shards=plan.n_shards, options=options
        ):
            outcome.add(raw, preparer, writer)
        writer.close()
    return ShardRecord(
        source=plan.source,
        shard=plan.shard,
        path=str(output),
        sha256=sha256_file(output),
        n_records=outcome.n_records,
        n_documents=outcome.n_documents,
        n_bytes=output.stat().st_size,
        n_rejected_by_reason=dict(sorted(outcome.rejected.items())),
        n_filtered_by_reason=dict(sorted(outcome.filtered.items())),
        rejected_examples=tuple(outcome.examples),
    )


def without_emails(value: Any) -> Any:
    if isinstance(value, str):
        return replace_emails(value)
    if isinstance(value, list):
        return [without_emails(item) for item in value]
    if isinstance(value, dict):
        return {key: without_emails(item) for key, item in value.items()}
    return value
