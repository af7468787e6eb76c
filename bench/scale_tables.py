"""What an extrapolation says, as records and as tables."""

from dataclasses import asdict, replace
from typing import Any

from scale_limits import (
    first_limit,
    limits,
    longest_beside_training,
    node_limits,
    shard_limits,
    size_limits,
)
from scale_model import Curves, Size, Values, estimates

Row = dict[str, Any]
HOUR, GB = 3600.0, 1e9


def result_of(cases: list[tuple[str, Size]], v: Values, curves: Curves) -> Row:
    """Extrapolate every case, and find the limits."""
    rows = []
    for model, size in cases:
        longest = longest_beside_training(size, v, curves)
        rows.append({
            "model": model, "n_tokens": size.n_tokens, "n_nodes": size.n_nodes,
            "n_gpus": size.n_gpus,
            "stages": [asdict(estimate) for estimate in estimates(size, v, curves)],
            "longest_beside_training": None if longest is None else longest[0],
            "longest_over_training": None if longest is None else longest[1],
        })  # fmt: skip
    # One for each model and size, over nodes; and one for each model and number of nodes.
    by_nodes = {(model, size.n_tokens): size for model, size in cases}
    by_tokens = {(model, size.n_nodes): size for model, size in cases}
    found = limits(cases[0][1], v, curves)
    first = first_limit(found)
    return {
        "cases": rows,
        "limits_of_tokens": [asdict(limit) for limit in found],
        "limits_of_shards": [asdict(limit) for limit in shard_limits(curves)],
        "limits_of_nodes": [
            {"model": model, "n_tokens": n, **asdict(limit)}
            for (model, n), size in by_nodes.items()
            for limit in node_limits(replace(size, n_nodes=1), v, curves)
        ],
        "limits_beside_training": [
            {"model": model, "n_nodes": n, **asdict(limit)}
            for (model, n), size in by_tokens.items()
            for limit in size_limits(size, v, curves)
        ],
        "first_limit": None if first is None else asdict(first),
    }


def print_tables(result: Row) -> None:
    """Print one table for each model and number of tokens, in their order."""
    tables: dict[tuple[float, str], list[Row]] = {}
    for case in result["cases"]:
        tables.setdefault((case["n_tokens"], case["model"]), []).append(case)
    for (n_tokens, model), cases in tables.items():
        print_table(n_tokens, model, cases)


def print_table(n_tokens: float, model: str, cases: list[Row]) -> None:
    """Print hours by stage and number of nodes."""
    nodes = "".join(f"{case['n_nodes']:>12} node{'s' * (case['n_nodes'] > 1)}" for case in cases)
    print(f"\n{n_tokens:.3g} tokens, {model}: hours{'':>15}{nodes}   GB of a process")
    for place, stage in enumerate(cases[0]["stages"]):
        columns = [case["stages"][place] for case in cases]
        hours = "".join(f"{hours_words(column):>17}" for column in columns)
        memory = stage["memory_bytes"]
        held = "" if memory is None else f"{memory / GB:10.1f}"
        print(f"  {stage['stage']:34}{hours} {held:>10}   {columns[-1]['scales']}")
    for case in cases:
        if case["longest_beside_training"] is not None:
            print(f"  {case['n_nodes']} nodes: longest beside training is"
                  f" {case['longest_beside_training']}, {case['longest_over_training']:.2g} times"
                  " the training")  # fmt: skip


def hours_words(stage: Row) -> str:
    """Write a stage's hours, with its band where there is one.

    >>> hours_words({"seconds": 7200.0, "low_s": None, "high_s": None})
    '2'
    """
    if stage["seconds"] is None:
        return "null"
    if stage["low_s"] is None:
        return f"{stage['seconds'] / HOUR:.3g}"
    low, high = stage["low_s"] / HOUR, stage["high_s"] / HOUR
    return f"{low:.3g}-{high:.3g}"


def print_limits(result: Row) -> None:
    """Print what is reached first, and what after it."""
    print("\nlimits of the number of tokens, in their order:")
    for limit in result["limits_of_tokens"]:
        print(f"  {_at(limit):>22}  {limit['what']}")
    for limit in result["limits_of_shards"]:
        print(f"  {_at(limit):>22}  {limit['what']}")
    seen = None
    for limit in result["limits_of_nodes"]:
        head = f"\nfrom how many nodes on, {limit['n_tokens']:.3g} tokens, {limit['model']}:"
        if head != seen:
            print(head)
            seen = head
        print(f"  {_at(limit):>22}  {limit['what']}")
    print("\nfrom how many tokens on a stage is longer than training (only those that change):")
    for limit in result["limits_beside_training"]:
        if limit["at"] is not None and limit["at"] > 1e6:
            print(f"  {_at(limit):>22}  {limit['model']}: {limit['what']}")


def _at(limit: Row) -> str:
    return f"null ({limit['reason']})" if limit["at"] is None else (
        f"{limit['at']:.3g} {limit['unit']}")  # fmt: skip
