from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.core.errors import DataError
from expertflow.data.columns import KEPT, NO_CATEGORY, STATUS, Columns
from expertflow.data.documents import group_hash, text_hash
from expertflow.data.selection import (
    apply_weights,
    cap_categories,
    mark_held_out,
    mark_lowest,
    select_documents,
    split_edge,
)
from expertflow.data.settings import DeduplicateSpec


def dedup_spec(**changes: Any) -> DeduplicateSpec:
    settings: dict[str, Any] = {
        "eval_fraction": 0.1, "max_documents": None, "seed": 1, "max_rejected_fraction": 0.01,
        "near": None, "weights": {}, "max_per_source": {}, "max_per_category": None,
        "category_caps": {},
    }  # fmt: skip
    return DeduplicateSpec(**{**settings, **changes})


def columns(n: int, *, sources: str = "s", categories: tuple[str | None, ...] = (None,)) -> Columns:
    """Make ``n`` documents in groups of their own, sources and categories in turn."""
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
    select_documents(of, dedup_spec(max_per_source={"a": 10, "b": 100}), expert="e")
    left = Counter(row % 3 for row in kept(of))
    assert left == {0: 10, 1: 100, 2: 100}
    assert reasons(of) == {"duplicate": 30, "kept": 210, "over_source_cap": 90}
    of = columns(20_000, sources="ab")
    select_documents(of, dedup_spec(max_per_source={"a": 1000}, max_documents=5500), expert="e")
    assert sum(row % 2 == 0 for row in kept(of)) == pytest.approx(500, abs=60)


def test_categories_are_capped() -> None:
    of = columns(600, categories=("x", None, "y", "z", "u", "x"))
    of.status[:6] = STATUS.index("duplicate")
    spec = dedup_spec(max_per_category=50, category_caps={"y": 70, "z": 0, "none such": 1})
    cap_categories(of, spec)
    left = Counter(of.category[kept(of)].tolist())
    assert left == {0: 50, NO_CATEGORY: 99, 1: 70, 3: 50}
    assert reasons(of)["over_category_cap"] == 594 - 269


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


def test_choices_and_sides_last_when_data_grows() -> None:
    few, many, other = columns(1000), columns(10_000), columns(1000)
    sides = [mark_held_out(of.group, split_edge(of, 0.05, expert="e"))[:1000] for of in (few, many)]
    assert (sides[0] == sides[1]).all()
    select_documents(few, dedup_spec(max_documents=100), expert="e")
    select_documents(many, dedup_spec(max_documents=1000), expert="e")
    before, after = set(kept(few)), {row for row in kept(many) if row < 1000}
    assert len(before & after) >= 80
    select_documents(other, dedup_spec(max_documents=100, seed=2), expert="e")
    assert len(before & set(kept(other))) < 30


def test_a_set_that_was_cut_by_a_plain_hash_is_still_split_evenly() -> None:
    groups = [f"question {i}" for i in range(20_000)]
    cut = [group for group in groups if text_hash(group)[0] < 0x40]
    of = columns(len(cut))
    of.group[:] = [group_hash(group) for group in cut]
    assert 0.04 < mark_held_out(of.group, split_edge(of, 0.05, expert="e")).mean() < 0.06


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=20, unique=True),
    st.floats(0, 1) | st.sampled_from([1e-300, 1 - 2**-53]),
)
def test_there_is_always_something_on_both_sides(groups: list[int], fraction: float) -> None:
    of = columns(len(groups))
    of.group[:] = groups
    sides = mark_held_out(of.group, split_edge(of, fraction, expert="e"))
    assert 1 <= sides.sum() < len(groups)
    n_below = sum(group < fraction * 2**64 for group in groups)
    if 1 <= n_below < len(groups):
        assert sides.sum() == n_below


@pytest.mark.parametrize(("n", "why"), [(0, ""), (1, ""), (4, " all are of one group;")])
def test_one_group_cannot_be_split(n: int, why: str) -> None:
    of = columns(n + 1)
    of.group[:-1] = 7
    of.status[-1] = 1
    message = f"e: {n} documents are too few to hold one out;{why} add records"
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
    with pytest.raises(DataError, match=f"e: 1 documents are left after caps; raise {name},"):
        select_documents(columns(9, categories=("c",)), dedup_spec(**limit), expert="e")


def test_the_last_limit_leaves_something_on_both_sides() -> None:
    of = columns(1000, sources="ab")
    spec = dedup_spec(eval_fraction=0.01, max_documents=5, weights={"a": 3.0, "b": 3.0})
    edge, copies = select_documents(of, spec, expert="e")
    rows = kept(of)
    sides = mark_held_out(of.group[rows], edge)
    assert len(rows) == 5 and 1 <= sides.sum() < 5
    assert copies[rows].tolist() == np.where(sides, 1, 3).tolist()


@given(st.data())
def test_no_group_lies_on_both_sides_and_no_side_is_empty(data: st.DataObject) -> None:
    n = data.draw(st.integers(4, 60))
    of = columns(n, sources="ab", categories=("x", "y", None))
    of.group[:] = [group_hash(str(data.draw(st.integers(0, n // 3)))) for _ in range(n)]
    spec = dedup_spec(
        eval_fraction=data.draw(st.floats(0.01, 0.99)),
        weights={"a": data.draw(st.floats(0.1, 4.0))},
        max_per_category=data.draw(st.none() | st.integers(n, 2 * n)),
        max_documents=data.draw(st.none() | st.integers(2, n)),
    )
    try:
        edge, copies = select_documents(of, spec, expert="e")
    except DataError:
        assert len(set(of.group[kept(of)])) < 2
        return
    rows = np.array(kept(of))
    sides = mark_held_out(of.group[rows], edge)
    assert 1 <= sides.sum() < len(rows)
    assert not set(of.group[rows[sides]]) & set(of.group[rows[~sides]])
    assert (copies[rows[sides]] == 1).all() and (copies[rows] >= 1).all()
