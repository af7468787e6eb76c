"""What stops growing, and where: sizes and numbers of nodes at which a limit is reached."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from scale_figures import Line, crossing
from scale_model import MAX_PIECES, MAX_SHARDS, Curves, Size, Values, estimates, over, times

GB = 1e9
MEMORY_BYTES = (64 * GB, 256 * GB)
DRY_RUN_S = 60.0
NOT_A_STOP = {"train", "held-out loss while training"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Something that is reached at a number of tokens, or at a number of something else.

    ``at`` is null where it is not known or never reached, which ``reason`` says.
    """

    what: str
    at: float | None
    unit: str
    reason: str | None = None


def limits(size: Size, v: Values, curves: Curves) -> list[Limit]:
    """Give all limits on the number of tokens, in rising order; unknown ones last."""
    found = [
        Limit(
            what=f"{what} needs {limit / GB:.0f} GB",
            **_tokens(_documents_at(line, limit), v["tokens_per_document"]),
        )
        for what, line in (
            ("deduplicate, one process,", curves.deduplicate_bytes),
            ("pack, one process,", curves.pack_bytes),
            ("opening the rows, each training process,", curves.open_bytes),
        )
        for limit in MEMORY_BYTES
    ]
    found += [
        Limit(
            what="pieces of documents outnumber int32 (packing)",
            **_tokens(float(MAX_PIECES), v["tokens_per_document"]),
        ),
        Limit(
            what="packed rows outgrow a node's NVMe",
            **_tokens(v["nvme_bytes"], over(1.0, v["row_bytes_per_token"])),
        ),
        Limit(
            what="tokens outgrow a node's memory; packing reads documents from a disk",
            **_tokens(v["node_memory_bytes"], over(1.0, v["token_bytes_per_token"])),
        ),
    ]
    return sorted(found, key=lambda limit: (limit.at is None, limit.at or 0.0))


def shard_limits(curves: Curves) -> list[Limit]:
    """Give the limits on the number of shards."""
    line = curves.dry_run_s
    at = None if line is None else line.reaches(DRY_RUN_S)
    reason = None if at is not None else "dry runs were not measured at two sizes"
    return [
        Limit(what="shards of one source (the manifest's bound)", at=MAX_SHARDS, unit="shards"),
        Limit(what="a dry run takes a minute", at=at, unit="shards", reason=reason),
    ]


def node_limits(size: Size, v: Values, curves: Curves) -> list[Limit]:
    """Give, for each stage, from how many nodes on it takes longer than the training.

    A stage may share its own work among nodes; so the number is looked for, not divided.
    """
    names = [e.stage for e in estimates(size, v, curves) if e.stage not in NOT_A_STOP]
    found = []
    for name in names:
        at = first_node(size, lambda s, name=name: ratio(name, s, v, curves))
        never = None if at is not None else "not below 100,000 nodes, or not known"
        found.append(Limit(what=f"{name}: longer than training", at=at, unit="nodes", reason=never))
    disk, one = v["shared_disk_bytes_per_s"], v["copy_bytes_per_s"]
    found.append(Limit(what="staging saturates the shared disk", unit="nodes", at=over(disk, one)))
    reading = over(v["raw_bytes_per_token"], v["prepare_s_per_token"])
    found.append(
        Limit(what="preparing saturates the shared disk", unit="cores", at=over(disk, reading))
    )
    return sorted(found, key=lambda limit: (limit.at is None, limit.at or 0.0))


def size_limits(size: Size, v: Values, curves: Curves) -> list[Limit]:
    """Give, for each stage, from how many tokens on it takes longer than the training."""
    found = []
    for estimate in estimates(size, v, curves):
        if estimate.stage in NOT_A_STOP:
            continue
        at = crossing(
            lambda n, name=estimate.stage: ratio(name, replace(size, n_tokens=n), v, curves),
            1.0, low=1e6, high=1e14,
        )  # fmt: skip
        found.append(Limit(
            what=f"{estimate.stage}: longer than training on {size.n_nodes} nodes", at=at,
            unit="tokens", reason=None if at else "not below 1e14 tokens, or not known",
        ))  # fmt: skip
    return found


def first_node(size: Size, curve: Callable[[Size], float | None]) -> int | None:
    """Give the least number of nodes at which a rising curve over them is above 1."""
    low, high = 1, 100_000
    last = curve(replace(size, n_nodes=high))
    if last is None or last <= 1:
        return None
    while low < high:
        between = (low + high) // 2
        value = curve(replace(size, n_nodes=between))
        if value is not None and value > 1:
            high = between
        else:
            low = between + 1
    return low


def ratio(stage: str, size: Size, v: Values, curves: Curves) -> float | None:
    """Give a stage's time as a multiple of the training's."""
    by_stage = {e.stage: e.seconds for e in estimates(size, v, curves)}
    return over(by_stage[stage], by_stage["train"])


def longest_beside_training(size: Size, v: Values, curves: Curves) -> tuple[str, float] | None:
    """Name the stage that takes longest beside the training, and its multiple of it."""
    ratios = {
        e.stage: value
        for e in estimates(size, v, curves)
        if e.stage not in NOT_A_STOP and (value := ratio(e.stage, size, v, curves)) is not None
    }
    return max(ratios.items(), key=lambda item: item[1]) if ratios else None


def first_limit(found: Iterable[Limit]) -> Limit | None:
    """Give the limit that is reached first."""
    known = [limit for limit in found if limit.at is not None]
    return min(known, key=lambda limit: limit.at or 0.0) if known else None


def _documents_at(line: Line | None, n_bytes: float) -> float | None:
    return None if line is None else line.reaches(n_bytes)


def _tokens(n: float | None, tokens_each: float | None) -> dict[str, float | str | None]:
    at = times(n, tokens_each)
    reason = None if at is not None else "a figure that it needs is not known"
    return {"at": at, "unit": "tokens", "reason": reason}
