"""Draw the chain of records as rows of boxes: what was made from what, with short hashes."""

from typing import Any, NamedTuple

Chain = list[dict[str, Any]]
Stages = tuple[str, ...]
# What stands below was made from what stands above it: documents on the left, the model and its
# tokens on the right, both above what packing makes of them. Stages on no list come last.
DOCUMENTS: tuple[Stages, ...] = (
    ("fetch_source", "generate_source"),
    ("find_datasets",),
    ("prepare_shard",),
    ("deduplicate_documents",),
)
TOKENS: tuple[Stages, ...] = (("prepare_model",), ("pretokenize_shard",))
TRUNK: tuple[Stages, ...] = (
    ("pack_sequences",),
    ("calibrate_expert",),
    ("plan_training",),
    ("stage_to_nvme",),
    ("train_expert",),
    ("evaluate_expert",),
    ("export_model",),
)
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
    """Place the stages that there are."""
    known = {stage for stages in (*DOCUMENTS, *TOKENS, *TRUNK) for stage in stages}
    others = dict.fromkeys(item["stage"] for item in chain if item["stage"] not in known)
    left, right, trunk = (
        [box for stages in column if (box := _box(chain, stages))]
        for column in (DOCUMENTS, TOKENS, (*TRUNK, *((stage,) for stage in others)))
    )
    placed: list[tuple[Box | None, ...]] = [(box,) for box in (*left, *right, *trunk)]
    if left and right:  # side by side, both down to the row above packing
        height = max(len(left), len(right))
        columns = ([*[None] * (height - len(boxes)), *boxes] for boxes in (left, right))
        placed = [*zip(*columns, strict=True), *((box,) for box in trunk)]
    above = [(), *placed]
    return tuple(Row(b, _link(a, b)) for a, b in zip(above, placed, strict=False))


def _box(chain: Chain, stages: Stages) -> Box | None:
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
    if above[0] and boxes[1] and boxes[1].stage == "pretokenize_shard":
        lines.append("elbow")
    return " ".join(lines)
