"""Every epoch sees every row once, however many ranks share it and whatever groups it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expertflow.train.feed.order import RowOrder


def made_up_order(n_rows: int, global_batch: int, *, grouped: bool = False) -> RowOrder:
    lengths = np.random.default_rng(9).integers(1, 500, n_rows) if grouped else None
    return RowOrder(n_rows=n_rows, global_batch=global_batch, seed=1, lengths_N=lengths)


def test_each_epoch_has_its_own_order() -> None:
    order = made_up_order(10, 4)
    steps = [order.rows_of_step(s) for s in range(6)]
    first, second = np.concatenate(steps[:3]), np.concatenate(steps[3:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]


def test_one_process_sees_the_seeded_permutation() -> None:
    """Runs that were started with an earlier version see the same rows when they are repeated."""
    expected = np.random.default_rng([1, 2]).permutation(10)
    order = made_up_order(10, 4)
    assert np.concatenate([order.rows_of_step(s) for s in (6, 7, 8)]).tolist() == expected.tolist()


@given(
    n_rows=st.integers(1, 300),
    global_batch=st.integers(1, 40),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
    grouped=st.booleans(),
)
def test_the_ranks_see_the_global_batch_once(
    n_rows: int, global_batch: int, world_size: int, epoch: int, grouped: bool
) -> None:
    order = made_up_order(n_rows, global_batch, grouped=grouped)
    per_epoch = -(-n_rows // global_batch)
    seen: list[int] = []
    for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        shares = [order.rows_of_step(step)[rank::world_size] for rank in range(world_size)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        together = np.concatenate(shares).tolist()
        assert sorted(together) == sorted(order.rows_of_step(step).tolist())
        seen += together
    assert sorted(seen) == list(range(n_rows))


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    walked = made_up_order(100, 7, grouped=True)
    steps = [walked.rows_of_step(s).tolist() for s in range(45)]
    for s in (44, 3, 20):
        assert made_up_order(100, 7, grouped=True).rows_of_step(s).tolist() == steps[s]


def test_grouped_rows_are_of_similar_length_and_steps_are_not_sorted() -> None:
    order, plain = made_up_order(4000, 16, grouped=True), made_up_order(4000, 16)
    lengths = order.lengths_N
    assert lengths is not None

    def spread(of: RowOrder) -> float:
        return float(np.mean([np.ptp(lengths[of.rows_of_step(s)]) for s in range(250)]))

    assert spread(order) < 0.1 * spread(plain)
    means = [lengths[order.rows_of_step(s)].mean() for s in range(250)]
    assert abs(np.corrcoef(means, np.arange(250))[0, 1]) < 0.2
