"""Draw the chain of records as rows of boxes: what was made from what, with short hashes."""

from typing import Any

from expertflow.core.records import Record

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


class Made(Record, frozen=True, kw_only=True):
    """A record, with hashes of its content and of the code that made it."""

    record: str
    sha256: str
    code: str


class Box(Record, frozen=True, kw_only=True):
    """A stage and what it made; ``n_more`` records are not shown."""

    stage: str
    made: tuple[Made, ...]
    n_more: int


class Row(Record, frozen=True, kw_only=True):
    """Boxes side by side; ``link`` names the lines to the row above."""

    boxes: tuple[Box | None, ...]
    link: str


def chain_rows(chain: list[dict[str, Any]]) -> tuple[Row, ...]:
    known = {stage for stages in (*DOCUMENTS, *TOKENS, *TRUNK) for stage in stages}
    others = dict.fromkeys(item["stage"] for item in chain if item["stage"] not in known)
    left, right, trunk = (
        [box for stages in column if (box := _box(chain, stages))]
        for column in (DOCUMENTS, TOKENS, (*TRUNK, *((stage,) for stage in others)))
    )
    height = max(len(left), len(right)) if left and right else 0
    pairs = zip(_at_the_bottom(left, height), _at_the_bottom(right, height), strict=True)
    placed: list[tuple[Box | None, ...]] = [*pairs, *((box,) for box in trunk)]
    if not height:
        placed = [(box,) for box in (*left, *right, *trunk)]
    above = [(), *placed]
    return tuple(Row(boxes=b, link=_link(a, b)) for a, b in zip(above, placed, strict=False))


def _at_the_bottom(boxes: list[Box], height: int) -> list[Box | None]:
    return [*[None] * (height - len(boxes)), *boxes] if height else []


def _box(chain: list[dict[str, Any]], stages: Stages) -> Box | None:
    found = [item for item in chain if item["stage"] in stages]
    if not found:
        return None
    return Box(
        stage=", ".join(dict.fromkeys(item["stage"] for item in found)),
        made=tuple(
            Made(
                record=item["record"],
                sha256=(item["sha256"] or "")[:N_HASH],
                code=(item["code"] or "")[:N_HASH],
            )
            for item in found[:N_RECORDS]
        ),
        n_more=max(0, len(found) - N_RECORDS),
    )


def _link(above: tuple[Box | None, ...], boxes: tuple[Box | None, ...]) -> str:
    if not above or len(above) == len(boxes) == 1:
        return "straight" if above else ""
    if len(boxes) == 1:
        return "join" if all(above) else "left" if above[0] else "right"
    lines = [name for name, a, b in zip(("left", "right"), above, boxes, strict=True) if a and b]
    if above[0] and boxes[1] and boxes[1].stage == "pretokenize_shard":
        lines.append("elbow")
    return " ".join(lines)
