"""Name and number the shards of a source."""

from itertools import pairwise

from expertflow.data.records import ShardPlan

SHARDS_PER_TOKEN_SHARD = 16


def shard_names(n_shards: int) -> list[str]:
    """Name the shards of a source so that they sort in their order."""
    return [f"{index:03d}" for index in range(n_shards)]


def token_shards(n_shards: int) -> dict[str, list[str]]:
    """Say which document shards are tokenised by one job: runs of them, of equal length.

    Loading a large vocabulary takes as long as tokenising a few of them.
    """
    names = shard_names(n_shards)
    n_runs = -(-n_shards // SHARDS_PER_TOKEN_SHARD)
    edges = [n_shards * i // n_runs for i in range(n_runs + 1)]
    runs = (names[start:end] for start, end in pairwise(edges))
    return dict(zip(shard_names(n_runs), runs, strict=True))


def plan_shards(source: str, n_shards: int) -> tuple[ShardPlan, ...]:
    """Say which part of a source each of its jobs prepares."""
    return tuple(
        ShardPlan(source=source, shard=name, index=index, n_shards=n_shards)
        for index, name in enumerate(shard_names(n_shards))
    )
