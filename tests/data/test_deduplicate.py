from collections import Counter
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertflow.data.deduplicate import Candidate, cap, drop_repeats, held_out_groups


def groups(n: int) -> set[str]:
    return {sha256(str(i).encode()).hexdigest() for i in range(n)}


def candidate(row: int, text: str, group: str = "g") -> Candidate:
    return Candidate("s", "000", row, text, group)


def test_the_first_of_equal_documents_stays() -> None:
    dropped: Counter[str] = Counter()
    kept = drop_repeats([candidate(i, t) for i, t in enumerate("abacb")], dropped)
    assert [c.row for c in kept] == [0, 1, 3]
    assert dropped == {"duplicate": 2}


def test_a_group_keeps_its_side_when_data_grows() -> None:
    small, large = groups(500), groups(5000)
    assert held_out_groups(large, 0.05) & small == held_out_groups(small, 0.05)


def test_about_the_wanted_share_is_held_out() -> None:
    assert 0.03 < len(held_out_groups(groups(5000), 0.05)) / 5000 < 0.07


def test_a_set_that_was_cut_by_the_same_hash_is_still_split_evenly() -> None:
    cut = {group for group in groups(20_000) if int(group[:8], 16) < 0.25 * 16**8}
    assert 0.03 < len(held_out_groups(cut, 0.05)) / len(cut) < 0.07


@given(st.integers(2, 50), st.floats(0.001, 0.999))
def test_there_is_always_something_on_both_sides(n: int, fraction: float) -> None:
    held_out = held_out_groups(groups(n), fraction)
    assert 1 <= len(held_out) < n


@pytest.mark.parametrize("n", [1, 7, 100])
def test_a_cap_chooses_by_content_and_keeps_the_order(n: int) -> None:
    documents = [candidate(i, f"text {i}") for i in range(50)]
    dropped: Counter[str] = Counter()
    kept = cap(documents, n, dropped, seed=1)
    assert len(kept) == min(n, 50)
    assert [c.row for c in kept] == sorted(c.row for c in kept)
    again = cap(list(reversed(documents)), n, Counter(), seed=1)
    assert {c.row for c in again} == {c.row for c in kept}
    assert dropped["over_max_documents"] == max(0, 50 - n)
