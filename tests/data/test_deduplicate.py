"""Which documents of all shards are kept, and which of them are held out."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from expertflow.core.errors import DataError
from expertflow.core.files import canonical_json
from expertflow.core.records import to_json
from expertflow.data.deduplicate import deduplicate_documents
from expertflow.data.documents import KEEP, DocumentWriter, NewDocument, group_hash, text_hash
from expertflow.data.near import Signer
from expertflow.data.records import Body, DocumentsRecord, ShardRecord
from expertflow.data.selection import (
    KEPT,
    NO_CATEGORY,
    STATUS,
    Columns,
    apply_weights,
    cap_categories,
    mark_held_out,
    mark_lowest,
    select_documents,
    split_edge,
)
from expertflow.data.settings import DeduplicateSpec, NearSpec
from expertflow.data.shapes import frame_of

NEAR = NearSpec(threshold=0.8, n_words=3, n_permutations=128)
# text, group, category
Row = tuple[str, str, str | None]


def spec(**changes: Any) -> DeduplicateSpec:
    settings: dict[str, Any] = {
        "eval_fraction": 0.2, "max_documents": None, "seed": 1, "max_rejected_fraction": 0.1,
        "near": None, "weights": {}, "max_per_source": {}, "max_per_category": None,
        "category_caps": {},
    }  # fmt: skip
    return DeduplicateSpec(**{**settings, **changes})


def write_shard(
    folder: Path, documents: Sequence[str | Row], *, source: str = "s", shard: str = "000",
    near: NearSpec | None = None, first: int = 0, **changes: Any,
) -> ShardRecord:  # fmt: skip
    """Write a shard; a plain text is its own group and has no category."""
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
        n_documents=len(documents), n_rejected_by_reason={}, n_filtered_by_reason={},
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
        ({"n_records": 0}, "source t: no record was selected; correct its where"),
        ({"n_records": 9, "n_filtered_by_reason": {"sql": 2, "length": 7}},
         "source t: none of its 9 records is left: length 7, sql 2; see results/e/documents/t/"),
        # Files that do not match their record.
        ({"n_records": 2, "n_documents": 1}, "does not have the 1 documents"),
    ],
)  # fmt: skip
def test_a_useless_source_is_rejected(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    shards = [write_shard(tmp_path, "ab"), write_shard(tmp_path, [], source="t", **changes)]
    with pytest.raises(DataError, match=message):
        run(tmp_path, shards, spec())


def columns(n: int, *, sources: str = "s", categories: tuple[str | None, ...] = (None,)) -> Columns:
    """Make ``n`` documents in separate groups, with alternating sources and categories."""
    texts = [int.from_bytes(text_hash(f"text {i}")[:8], "little") for i in range(n)]
    names = [name for name in dict.fromkeys(categories) if name is not None]
    places = [NO_CATEGORY if name is None else names.index(name) for name in categories]
    return Columns(
        text=np.array(texts, np.uint64), text_rest=np.zeros(n, np.uint64),
        group=np.array([group_hash(f"group {i}") for i in range(n)], np.uint64),
        category=np.resize(np.array(places, np.int32), n),
        source=np.resize(np.arange(len(sources), dtype=np.uint16), n), status=np.zeros(n, np.uint8),
        sources=list(sources), categories=names,
    )  # fmt: skip


def kept(of: Columns) -> list[int]:
    return np.flatnonzero(of.status == KEPT).tolist()


def reasons(of: Columns) -> dict[str, int]:
    return dict(Counter(STATUS[place] for place in of.status.tolist()))


def test_a_source_is_capped_alone() -> None:
    equal = mark_lowest(np.zeros(500, np.uint64), np.arange(500), 7, seed=1, rule="below_weight")
    assert np.flatnonzero(equal).tolist() == list(range(7))
    of = columns(330, sources="abc")
    of.status[:30] = STATUS.index("duplicate")
    select_documents(of, spec(max_per_source={"a": 10, "b": 100}), expert="e")
    left = Counter(row % 3 for row in kept(of))
    assert left == {0: 10, 1: 100, 2: 100}
    assert reasons(of) == {"duplicate": 30, "kept": 210, "over_source_cap": 90}
    of = columns(20_000, sources="ab")
    select_documents(of, spec(max_per_source={"a": 1000}, max_documents=5500), expert="e")
    assert sum(row % 2 == 0 for row in kept(of)) == pytest.approx(500, abs=60)


def test_categories_are_capped() -> None:
    of = columns(600, categories=("x", None, "y", "z", "u", "x"))
    of.status[:6] = STATUS.index("duplicate")
    limits = spec(max_per_category=50, category_caps={"y": 70, "z": 0})
    cap_categories(of, limits)
    left = Counter(of.category[kept(of)].tolist())
    assert left == {0: 50, NO_CATEGORY: 99, 1: 70, 3: 50}
    assert reasons(of)["over_category_cap"] == 594 - 269
    with pytest.raises(DataError, match=r"no document has category 'w'; .* 'x', 'y', 'z', 'u'"):
        cap_categories(of, spec(category_caps={"y": 70, "w": 1}))


@pytest.mark.parametrize(
    ("weight", "n_train", "n_copies"),
    [
        (1.0, 100, 100), (0.25, 25, 25), (0.297, 30, 30), (0.001, 1, 1), (2.0, 100, 200),
        (2.3, 100, 230),
    ],
)  # fmt: skip
def test_a_weight_thins_or_repeats_documents(weight: float, n_train: int, n_copies: int) -> None:
    of = columns(240, sources="ab")
    of.group[:] = np.where(np.arange(240) < 40, 0, 1 << 60)
    copies = apply_weights(of, {"a": weight}, edge=1, seed=1)
    train = [row for row in kept(of) if row >= 40]
    weighted = [row for row in train if row % 2 == 0]
    assert (len(weighted), copies[weighted].sum()) == (n_train, n_copies)
    assert copies[weighted].max() <= int(weight) + 1
    assert len(train) - len(weighted) == 100
    assert set(range(40)) <= set(kept(of))
    assert (copies[:40] == 1).all() and (copies[1::2] == 1).all()


def test_choices_and_sides_stay_when_data_grows() -> None:
    few, many, other = columns(1000), columns(10_000), columns(1000)
    sides = [mark_held_out(of.group, split_edge(of, 0.05, expert="e"))[:1000] for of in (few, many)]
    assert (sides[0] == sides[1]).all()
    select_documents(few, spec(max_documents=100), expert="e")
    select_documents(many, spec(max_documents=1000), expert="e")
    before, after = set(kept(few)), {row for row in kept(many) if row < 1000}
    assert len(before & after) >= 80
    select_documents(other, spec(max_documents=100, seed=2), expert="e")
    assert len(before & set(kept(other))) < 30


def test_a_set_selected_by_a_plain_hash_is_still_split_evenly() -> None:
    groups = [f"question {i}" for i in range(20_000)]
    cut = [group for group in groups if text_hash(group)[0] < 0x40]
    of = columns(len(cut))
    of.group[:] = [group_hash(group) for group in cut]
    assert 0.04 < mark_held_out(of.group, split_edge(of, 0.05, expert="e")).mean() < 0.06


@pytest.mark.parametrize(("n", "why"), [(0, ""), (1, ""), (4, ", all of one group")])
def test_one_group_cannot_be_split(n: int, why: str) -> None:
    of = columns(n + 1)
    of.group[:-1] = 7
    of.status[-1] = 1
    message = f"e: too few documents to hold one out: {n} left{why}; add records"
    with pytest.raises(DataError, match=message):
        split_edge(of, 0.5, expert="e")


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("data.max_documents", {"max_documents": 1}),
        ("max_documents of the sources", {"max_per_source": {"s": 1}}),
        ("data.max_per_category", {"max_per_category": 1}),
    ],
)
def test_a_limit_that_leaves_too_few_is_named(name: str, limit: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"e: only 1 documents are left after caps; raise {name},"):
        select_documents(columns(9, categories=("c",)), spec(**limit), expert="e")


@given(st.data())
def test_no_group_is_on_both_sides_and_no_side_is_empty(data: st.DataObject) -> None:
    n = data.draw(st.integers(4, 60))
    of = columns(n, sources="ab", categories=("x", "y", None))
    of.group[:] = [group_hash(str(data.draw(st.integers(0, n // 3)))) for _ in range(n)]
    limits = spec(
        eval_fraction=data.draw(st.floats(0.01, 0.99)),
        weights={"a": data.draw(st.floats(0.1, 4.0))},
        max_per_category=data.draw(st.none() | st.integers(n, 2 * n)),
        max_documents=data.draw(st.none() | st.integers(2, n)),
    )
    try:
        edge, copies = select_documents(of, limits, expert="e")
    except DataError:
        assert len(set(of.group[kept(of)])) < 2
        return
    rows = np.array(kept(of))
    sides = mark_held_out(of.group[rows], edge)
    assert 1 <= sides.sum() < len(rows)
    assert not set(of.group[rows[sides]]) & set(of.group[rows[~sides]])
    assert (copies[rows[sides]] == 1).all() and (copies[rows] >= 1).all()
