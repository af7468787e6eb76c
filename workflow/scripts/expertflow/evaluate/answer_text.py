"""Extract the answer from generated text: stop texts, thoughts, code fences."""

import re

THINK = "<think>"
_THOUGHTS = re.compile(rf"\A\s*{THINK}.*?</think>\s*", re.DOTALL)
# As in Markdown, a fence opens at the start of a line; a truncated reply may never close it.
_FENCE = re.compile(r"^ {0,3}```[^\n`]*\n(.*?)(?:^ {0,3}```|\Z)", re.MULTILINE | re.DOTALL)


def cut_at(text: str, stops: tuple[str, ...]) -> str:
    ends = [text.index(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def without_thoughts(text: str, prompt: str = "") -> str:
    """Drop the thoughts that a text begins with, or that its prompt opens."""
    opening = THINK if prompt.rstrip().endswith(THINK) else ""
    return _THOUGHTS.sub("", opening + text).removeprefix(opening)


def strip_code_fence(text: str) -> str:
    """Return the content of the first fenced block, or the text itself without one.

    Chat models often wrap an answer in a fence after a sentence. Counting that as wrong would
    flatter the expert over its base model.
    """
    found = _FENCE.search(text)
    return text if found is None else found[1]
