"""Turn one shard of a source's records into documents, and count every outcome.

Each record passes, in order: the manifest's ``where``, field checks, e-mail pseudonyms, template,
secret scanner, benchmark overlap. Rejects go to ``rejected.jsonl`` with file, line and field.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from expertflow.core.files import replacing, sha256_file
from expertflow.data import documents
from expertflow.data.checks.registry import build_checks
from expertflow.data.messages import drop_nulls
from expertflow.data.read import iter_shard
from expertflow.data.records import Fields, ShardRecord, SourceRecord
from expertflow.data.reject import Filtered, RawRecord, Reject, RejectLog
from expertflow.data.secrets import find_secrets, replace_emails
from expertflow.data.settings import PrepareSpec, format_label
from expertflow.data.shapes import MISSING, draft_maker, look_up, reject_missing_field, text_field


class DocumentMaker:
    def __init__(self, spec: PrepareSpec) -> None:
        self.spec, self.source = spec, spec.source
        self.noted = Counter[str]()
        self._draft = draft_maker(spec)
        self._check = build_checks(spec.source.checks, source=spec.source.name)
        self._find_overlap: Callable[[Sequence[str]], str | None] | None = None
        self._sign: Callable[[str], bytes] | None = None
        # Load only what is needed: a job should start quickly.
        if spec.benchmarks:
            from expertflow.data.leaks import BenchmarkIndex

            self._find_overlap = BenchmarkIndex.read(spec.benchmarks).find_overlap
        if spec.near is not None:
            from expertflow.data.near import Signer

            self._sign = Signer(spec.near).sign

    def is_wanted(self, raw: RawRecord) -> bool:
        where, record = self.source.where, raw.value
        if record is None or not where:
            return True
        return all(_equals(record.get(key), value) for key, value in where.items())

    def make_document(self, raw: RawRecord) -> documents.NewDocument:
        """Make a document; raise Reject for a faulty record, Filtered for an unwanted document."""
        if raw.value is None:
            assert raw.fault is not None
            raise raw.fault
        source, record = self.source, self._check(raw.value)
        if source.pseudonymize_emails:
            record = without_emails(record)
        if raw.unit == "row" and source.messages is not None:
            # A column pads each turn and tool with the keys of all others.
            padded = (source.messages, source.tools)
            record = {k: drop_nulls(v) if k in padded else v for k, v in record.items()}
        # After the checks, which may rewrite a field, and the pseudonyms.
        draft = self._draft(record)
        # In the texts that are trained on, not in fields that no template uses.
        if source.scan_secrets and (kinds := find_secrets("\n".join(draft.texts))):
            raise Filtered("secret", f"it contains {', '.join(kinds)}")
        if self._find_overlap and (path := self._find_overlap(draft.texts)) is not None:
            raise Filtered("in_benchmark", f"it shares words with {path}")
        texts = [documents.normalize_text(text) for text in draft.texts]
        # A plain text has no prompt: all of it decides its side of the split.
        n_given = draft.n_given or len(texts)
        given, answer = "\n".join(texts[:n_given]), "\n".join(texts[n_given:])
        group, text = documents.hash_document(given, answer)
        if draft.group is not None:
            group = documents.group_hash(documents.normalize_text(draft.group))
        if source.group is not None:
            value = look_up(record, source.group)
            is_blank = value is MISSING or _is_blank(value)
            if is_blank or not isinstance(value, str | int | float | Decimal):
                found = "no value" if is_blank else type(value).__name__
                detail = f"expected text or a number, found {found}"
                raise Reject("no_group", detail, field=source.group)
            # A column of integers that contains a null is read as floats.
            group = documents.group_hash(format_label(value))
        # Documents with the same identity are duplicates.
        identity = f"{given}\n{answer}"
        if names := source.duplicate_fields:
            values = (documents.normalize_text(text_field(record, name)) for name in names)
            identity = "\n".join(value.casefold() for value in values)
            text = documents.text_hash(identity)
        document = documents.NewDocument(
            self._id(raw, record),
            text,
            group,
            None if source.category is None else self._category(record, source.category),
            draft.frame,
            draft.contents,
            self._fields(record) if self.spec.evaluation_fields else b"{}",
            self._sign(identity) if self._sign else None,
        )
        # Only now: a field for evaluation may have been missing.
        self.noted.update(draft.notes)
        return document

    def _id(self, raw: RawRecord, record: Fields) -> str:
        own = record.get("id")
        # Not isinstance: True is an int.
        if type(own) is not str and type(own) is not int:
            own = f"{raw.path.rpartition('/')[2]}:{raw.number}"
        return f"{self.source.name}/{own}"

    def _category(self, record: Fields, name: str) -> str | None:
        value = look_up(record, name)
        if value is MISSING:
            raise reject_missing_field(record, name)
        return None if _is_blank(value) else format_label(value)

    def _fields(self, record: Fields) -> bytes:
        found = {}
        for names in self.spec.evaluation_fields:
            # Sources may call it by different names; a Parquet file of both has null in one.
            here = [record[name] for name in names.split("|") if name in record]
            if not here:
                raise reject_missing_field(record, names)
            found[names] = next((value for value in here if value is not None), None)
        try:
            return orjson.dumps(found)
        except TypeError as error:
            raise Reject("not_json", f"a field for evaluation: {error}") from error


def prepare_shard(
    *, spec: PrepareSpec, source: SourceRecord, shard: str, output: Path, rejected: Path
) -> ShardRecord:
    """Write a shard's documents and rejects; DataError if the manifest stops at the first one.

    The reject limit applies per source, regardless of the number of shards; the rejects remain.
    """
    maker, n_records = DocumentMaker(spec), 0
    with (
        replacing(output) as partial,
        replacing(rejected) as rejected_partial,
        pa.OSFile(str(partial), "wb") as sink,
        rejected_partial.open("w", encoding="utf-8") as stream,
    ):
        rejects = RejectLog(spec, stream)
        writer = documents.DocumentWriter(sink, spec.near)
        options = spec.source.options
        for raw in iter_shard(
            source.files, index=int(shard), n_shards=source.n_shards, options=options
        ):
            if not maker.is_wanted(raw):
                continue
            n_records += 1
            try:
                writer.add(maker.make_document(raw))
            except Reject as reject:
                rejects.add(raw, reject)
        writer.close()
    return ShardRecord(
        source=source.name,
        shard=shard,
        path=str(output),
        sha256=sha256_file(output),
        n_records=n_records,
        n_documents=n_records - rejects.rejected.total() - rejects.filtered.total(),
        n_rejected_by_reason=dict(sorted(rejects.rejected.items())),
        n_filtered_by_reason=dict(sorted(rejects.filtered.items())),
        n_noted_by_reason=dict(sorted(maker.noted.items())),
        rejected_examples=tuple(rejects.examples),
    )


def _is_blank(value: Any) -> bool:
    # An empty cell of a CSV file is text.
    return value is None or not str(value).strip()


def _equals(found: Any, wanted: Any) -> bool:
    # A manifest's dates and times are texts; columns have them as values. A datetime is a date.
    if isinstance(found, date | time) and isinstance(wanted, str):
        try:
            wanted = type(found).fromisoformat(wanted)
        except ValueError:
            return False
        zone = getattr(found, "tzinfo", None)
        if zone and wanted.tzinfo is None:
            wanted = wanted.replace(tzinfo=zone)
    return bool(found == wanted)


def without_emails(value: Any) -> Any:
    if isinstance(value, str):
        return replace_emails(value)
    # A column's map is a list of pairs.
    if isinstance(value, list | tuple):
        return [without_emails(item) for item in value]
    if isinstance(value, dict):
        return {replace_emails(key): without_emails(item) for key, item in value.items()}
    return value
