"""Draw the chain of records as rows of boxes: what was made from what, with short hashes."""

from typing import Any, NamedTuple

from expertflow.chain import STAGES

Chain = list[dict[str, Any]]
N_HASH = 10
N_RECORDS = 3  # of one stage; report.json has all


class Box(NamedTuple):
    """A stage and the records it made, with short hashes; ``n_more`` are not shown."""

    stage: str
    made: list[dict[str, str]]
    n_more: int


class Row(NamedTuple):
    """Boxes side by side; ``link`` names the lines to the row above."""

    boxes: tuple[Box | None, ...]
    link: str


def chain_rows(chain: Chain) -> tuple[Row, ...]:
    """Place the stages that there are: what stands below was made from what stands above it.

    Documents on the left, the tokenizer and the tokens on the right, both above what packing makes
    of them. Stages that are not known here come last.
    """
    columns: dict[str, list[Box]] = {"documents": [], "tokens": [], "": []}
    others = {item["stage"] for item in chain} - STAGES.keys()
    # Sources are fetched or generated: one box.
    groups = [("fetch_source", "generate_source"), *((name,) for name in list(STAGES)[2:])]
    for names in [*groups, *((name,) for name in sorted(others))]:
        if box := _box(chain, names):
            columns[STAGES[names[0]].side if names[0] in STAGES else ""].append(box)
    left, right, trunk = columns.values()
    placed: list[tuple[Box | None, ...]] = [(box,) for box in (*left, *right, *trunk)]
    if left and right:  # side by side, both down to the row above packing
        height = max(len(left), len(right))
        sides = ([*[None] * (height - len(boxes)), *boxes] for boxes in (left, right))
        placed = [*zip(*sides, strict=True), *((box,) for box in trunk)]
    above = [(), *placed]
    return tuple(Row(b, _link(a, b)) for a, b in zip(above, placed, strict=False))


def _box(chain: Chain, stages: tuple[str, ...]) -> Box | None:
    found = [item for item in chain if item["stage"] in stages]
    if not found:
        return None
    made = [
        {"record": item["record"], **{k: (item[k] or "")[:N_HASH] for k in ("sha256", "code")}}
        for item in found[:N_RECORDS]
    ]
    names = ", ".join(dict.fromkeys(item["stage"] for item in found))
    return Box(names, made, max(0, len(found) - N_RECORDS))


def _link(above: tuple[Box | None, ...], boxes: tuple[Box | None, ...]) -> str:
    """Name the lines between two rows; an elbow leads from the left box to the right one."""
    if not above or len(above) == len(boxes) == 1:
        return "straight" if above else ""
    if len(boxes) == 1:
        return "join" if all(above) else "left" if above[0] else "right"
    lines = [name for name, a, b in zip(("left", "right"), above, boxes, strict=True) if a and b]
    right = STAGES.get(boxes[1].stage) if boxes[1] else None
    if above[0] and right and above[0].stage in right.reads:
        lines.append("elbow")
    return " ".join(lines)
