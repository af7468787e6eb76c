from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_selection import dedup_spec

from expertflow.core.errors import DataError
from expertflow.core.files import canonical_json
from expertflow.core.records import to_json
from expertflow.data.columns import find_buckets
from expertflow.data.deduplicate import deduplicate_documents
from expertflow.data.documents import KEEP, DocumentWriter, NewDocument, group_hash, text_hash
from expertflow.data.near import Signer
from expertflow.data.records import Body, DocumentsRecord, ShardRecord
from expertflow.data.settings import DeduplicateSpec, NearSpec
from expertflow.data.shapes import frame_of

NEAR = NearSpec(threshold=0.8, n_words=3, n_permutations=128)
# text, group, category
Row = tuple[str, str, str | None]


def spec(**changes: Any) -> DeduplicateSpec:
    return dedup_spec(**{"eval_fraction": 0.2, "max_rejected_fraction": 0.1, **changes})


def write_shard(
    folder: Path, documents: Sequence[str | Row], *, source: str = "s", shard: str = "000",
    near: NearSpec | None = None, first: int = 0, **changes: Any,
) -> ShardRecord:  # fmt: skip
    """Write a shard; a text without more is a group of its own and in no category."""
    path = folder / f"{source}-{shard}.arrow"
    signer = Signer(near) if near is not None else None
    with pa.OSFile(str(path), "wb") as sink:
        writer = DocumentWriter(sink, near)
        for number, row in enumerate(documents, start=first):
            text, group, category = (row, row, None) if isinstance(row, str) else row
            writer.add(
                NewDocument(
                    f"{source}/{number}", text_hash(text), group_hash(group), category,
                    *frame_of(Body(text=text)), b"{}", signer.sign(text) if signer else None,
                )
            )  # fmt: skip
        writer.close()
    record = ShardRecord(
        source=source, shard=shard, path=str(path), sha256="", n_records=len(documents),
        n_documents=len(documents), n_bytes=0, n_rejected_by_reason={}, n_filtered_by_reason={},
        rejected_examples=(),
    )  # fmt: skip
    return replace(record, **changes)


def run(folder: Path, shards: list[ShardRecord], of: DeduplicateSpec) -> DocumentsRecord:
    return deduplicate_documents(expert="e", spec=of, shards=shards, keep=folder / "keep.arrow")


def keep_rows(folder: Path) -> list[dict[str, Any]]:
    with pa.memory_map(str(folder / "keep.arrow")) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table.schema == KEEP
    return list(table.to_pylist())


def test_the_first_of_equal_documents_stays(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path, "aba", source="one"),
        write_shard(tmp_path, "cbda", source="two"),
    ]
    record = run(tmp_path, shards, spec())
    kept = [(line["source"], line["row"]) for line in keep_rows(tmp_path)]
    assert kept == [("one", 0), ("one", 1), ("two", 0), ("two", 2)]
    assert record.n_dropped_by_reason == {"duplicate": 3}
    found = [(e.dropped, e.kept, e.reason, e.similarity) for e in record.duplicate_examples]
    assert found == [
        ("one/2", "one/0", "duplicate", 1.0),
        ("two/1", "one/1", "duplicate", 1.0),
        ("two/3", "one/0", "duplicate", 1.0),
    ]
    first, second = np.array([[7, 7, 8, 7, 8], [1, 2, 1, 1, 2]], np.uint64)
    assert [found.tolist() for found in find_buckets(first, second)] == [[0, 3], [0, 0]]


def text_of(number: int, *, changed: int = 0) -> str:
    words = [f"{number}w{i}" for i in range(100)]
    return " ".join([*words[: 100 - changed], *(f"x{i}" for i in range(changed))])


def test_near_duplicates_are_dropped(tmp_path: Path) -> None:
    texts = [text_of(1), text_of(2), text_of(1, changed=3), text_of(2, changed=40), text_of(1)]
    shards = [write_shard(tmp_path, texts, near=NEAR)]
    record = run(tmp_path, shards, spec(near=NEAR))
    assert [line["row"] for line in keep_rows(tmp_path)] == [0, 1, 3]
    assert record.n_dropped_by_reason == {"duplicate": 1, "near_duplicate": 1}
    exact, near = record.duplicate_examples
    assert (exact.dropped, exact.kept, exact.reason) == ("s/4", "s/0", "duplicate")
    assert (near.dropped, near.kept, near.reason) == ("s/2", "s/0", "near_duplicate")
    assert near.similarity == pytest.approx(0.94, abs=0.07)


def test_no_training_document_is_near_a_held_out_one(tmp_path: Path) -> None:
    texts = [text_of(n % 60, changed=n // 60) for n in range(240)]
    shards = [write_shard(tmp_path, texts, near=NEAR)]
    run(tmp_path, shards, spec(near=NEAR, eval_fraction=0.5))
    sides: dict[bool, set[int]] = {False: set(), True: set()}
    for line in keep_rows(tmp_path):
        sides[line["held_out"]].add(line["row"] % 60)
    assert not sides[False] & sides[True]
    assert len(sides[False]) + len(sides[True]) == 60


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 80), max_size=5), near=st.sampled_from([None, NEAR]))
def test_shards_make_no_difference(tmp_path: Path, cuts: list[int], near: NearSpec | None) -> None:
    documents = [
        (text_of(n % 30, changed=n % 4), str(n % 25), [None, "x", "y"][n % 3]) for n in range(80)
    ]
    of = spec(near=near, max_documents=20, max_per_category=9, weights={"s": 1.5})

    def outcome(ends: list[int]) -> tuple[str, list[tuple[int, bool, int]]]:
        starts = [0, *ends]
        shards = [
            write_shard(tmp_path, documents[a:b], shard=f"{i:03}", near=near, first=a)
            for i, (a, b) in enumerate(zip(starts, [*ends, 80], strict=True))
        ]
        record = replace(run(tmp_path, shards, of), sha256="")
        lines = keep_rows(tmp_path)
        kept = [(starts[int(x["shard"])] + x["row"], x["held_out"], x["n_copies"]) for x in lines]
        return canonical_json(to_json(record)), kept

    assert outcome(sorted(cuts)) == outcome([])


def test_every_record_is_accounted_for(tmp_path: Path) -> None:
    documents = [(text_of(n), f"g{n}", f"c{n % 3}" if n % 4 else None) for n in range(40)]
    shards = [
        write_shard(tmp_path, documents[:30], source="b", shard="000", n_records=34,
                    n_rejected_by_reason={"not_json": 1, "empty": 1},
                    n_filtered_by_reason={"secret": 2}),
        write_shard(tmp_path, documents[:2], source="b", shard="001"),
        write_shard(tmp_path, documents[20:], source="a", n_records=21,
                    n_rejected_by_reason={"not_json": 1}),
    ]  # fmt: skip
    of = spec(max_per_source={"b": 20}, weights={"a": 0.5, "b": 3.0}, category_caps={"c1": 3})
    record = run(tmp_path, shards, of)
    lines = keep_rows(tmp_path)
    assert [source.source for source in record.sources] == ["a", "b"]
    for source in record.sources:
        parts = (source.n_rejected, source.n_filtered, source.n_dropped, source.n_train)
        assert source.n_records == sum(parts) + source.n_held_out
        of_source = [line for line in lines if line["source"] == source.source]
        assert source.n_held_out == sum(line["held_out"] for line in of_source)
        assert source.n_train + source.n_held_out == len(of_source)
    copies = [line["n_copies"] for line in lines if not line["held_out"]]
    assert record.n_train_copies == sum(copies) > record.n_train == len(copies)
    assert (record.n_documents, record.n_records, record.n_rejected) == (len(lines), 57, 3)
    assert record.n_rejected_by_reason == {"empty": 1, "not_json": 2}
    assert record.n_filtered_by_reason == {"secret": 2}
    assert list(record.n_dropped_by_reason) == sorted(record.n_dropped_by_reason)
    assert sum(record.n_dropped_by_reason.values()) == sum(s.n_dropped for s in record.sources)
    assert 1 <= record.n_kept_by_category["c1"] <= 3
    assert sum(record.n_kept_by_category.values()) < len(lines)


def test_too_many_rejects_of_a_source_stop_the_run(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path, "ab", shard="000", n_records=20,
                    n_rejected_by_reason={"not_json": 1, "missing_field": 1},
                    rejected_examples=("d.jsonl, line 3: missing_field",)),
        write_shard(tmp_path, "c", shard="001", n_records=20,
                    n_rejected_by_reason={"missing_field": 1}, rejected_examples=("later",)),
    ]  # fmt: skip
    run(tmp_path, shards, spec(max_rejected_fraction=3 / 40))
    with pytest.raises(DataError) as caught:
        run(tmp_path, shards, spec(max_rejected_fraction=0.05))
    assert str(caught.value) == (
        "source s: 3 of 40 records rejected: missing_field 2, not_json 1; first: d.jsonl, line 3:"
        " missing_field; see results/e/documents/s/*.rejected.jsonl; correct the data or the"
        " template, or raise data.max_rejected_fraction (0.05)"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_records": 0}, "source t: no record was taken; correct its where"),
        ({"n_records": 9, "n_filtered_by_reason": {"sql": 2, "length": 7}},
         "source t: none of its 9 records is left: length 7, sql 2; see results/e/documents/t/"),
        # What is not what its record says.
        ({"n_records": 2, "n_documents": 1}, "not the 1 documents"),
    ],
)  # fmt: skip
def test_a_useless_source_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    shards = [write_shard(tmp_path, "ab"), write_shard(tmp_path, [], source="t", **changes)]
    with pytest.raises(DataError, match=message):
        run(tmp_path, shards, spec())
