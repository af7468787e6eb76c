"""What a document says, in two parts: a frame, and the texts that fill its places in order.

A frame is the JSON of a ``Body`` with null in the place of every text. Most documents of a source
share one frame, so they are rendered as columns of texts.
"""

from collections.abc import Sequence

import orjson

from expertflow.data.records import Body, ToolCall, Turn


def frame_of(body: Body) -> tuple[bytes, tuple[str, ...]]:
    """Take the texts out of a body. An empty text stays in the frame: it is laid out differently.

    Keys keep their order, so equal bodies give equal frames.
    """
    if body.text is not None:
        return orjson.dumps({"text": None}), (body.text,)
    turns = [
        {
            "role": turn.role,
            "content": None if turn.content else "",
            "learned": turn.learned,
            "tool_calls": turn.tool_calls,
            "tool_call_id": turn.tool_call_id,
        }
        for turn in body.turns
    ]
    texts = tuple(turn.content for turn in body.turns if turn.content)
    return orjson.dumps({"turns": turns, "tools": body.tools}), texts


def body_of(frame: bytes, texts: Sequence[str]) -> Body:
    """Put the texts back into a frame."""
    value = orjson.loads(frame)
    if "text" in value:
        return Body(text=texts[0])
    left = iter(texts)
    turns = (
        Turn(
            role=turn["role"],
            content=next(left) if turn["content"] is None else "",
            learned=turn["learned"],
            tool_calls=tuple(ToolCall(**call) for call in turn["tool_calls"]),
            tool_call_id=turn["tool_call_id"],
        )
        for turn in value["turns"]
    )
    return Body(turns=tuple(turns), tools=tuple(value["tools"]))
