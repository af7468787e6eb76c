"""Name and number the shards of a source."""

from expertflow.data.records import ShardPlan


def shard_names(n_shards: int) -> list[str]:
    """Name the shards of a source so that they sort in their order."""
    return [f"{index:03d}" for index in range(n_shards)]


def plan_shards(source: str, n_shards: int) -> tuple[ShardPlan, ...]:
    """Say which part of a source each of its jobs prepares."""
    return tuple(
        ShardPlan(source=source, shard=name, index=index, n_shards=n_shards)
        for index, name in enumerate(shard_names(n_shards))
    )
