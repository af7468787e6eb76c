"""Cut the answer out of what a model wrote: stop texts, thoughts, a fence of code."""

import re

_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)
# A fence opens at the start of a line, as in Markdown, and a reply cut short may never close it.
_FENCE = re.compile(r"^ {0,3}```[^\n`]*\n(.*?)(?:^ {0,3}```|\Z)", re.MULTILINE | re.DOTALL)


def cut_at(text: str, stops: tuple[str, ...]) -> str:
    """End a text before the first stop text in it."""
    ends = [text.index(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def without_thoughts(text: str) -> str:
    return _THOUGHTS.sub("", text)


def strip_code_fence(text: str) -> str:
    """Return the content of the first fenced block, or the text itself when there is none.

    A chat model often wraps its answer in a fence with a sentence before it. Counting that as
    wrong would flatter the trained expert against its base model, so prose around it is ignored.
    """
    found = _FENCE.search(text)
    return text if found is None else found[1]
