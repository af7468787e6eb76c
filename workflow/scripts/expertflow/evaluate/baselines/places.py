"""Name what stands in a prompt by where it stands: its second word, its last number, ...

Places are general on purpose: nothing here knows what task a prompt belongs to.
"""

import re
from collections import Counter
from collections.abc import Sequence

MAX_MARKS = 40  # words that places are counted from
MIN_MARK_FRACTION = 0.05  # of the prompts hold such a word
MAX_INDEX = 24  # places further from an end are not named

WORD = re.compile(r"\w+(?:\.\d+)?")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
QUOTED = re.compile(r"\"([^\"\n]+)\"|'([^'\n]+)'|`([^`\n]+)`")
NAME = re.compile(r"[A-Z][\w.'-]*(?: [A-Z][\w.'-]*)*")

Places = dict[str, str]


class Finder:
    """Finds the texts at all places of a prompt; marks are words that many prompts share."""

    def __init__(self, prompts: Sequence[str]) -> None:
        n_prompts = Counter(word for prompt in prompts for word in set(_words(prompt)))
        least = max(MIN_MARK_FRACTION * len(prompts), 2)
        often = sorted(n_prompts.items(), key=lambda item: (-item[1], item[0]))
        self._marks = [word for word, n in often[:MAX_MARKS] if n >= least]
        self._last: tuple[str, Places] | None = None

    def places(self, prompt: str) -> Places:
        """Map names of places to what stands there, in the order of preference."""
        if self._last is None or self._last[0] != prompt:
            self._last = (prompt, self._find(prompt))
        return self._last[1]

    def _find(self, prompt: str) -> Places:
        found: Places = {}
        quoted = [next(filter(None, match.groups())) for match in QUOTED.finditer(prompt)]
        last_line = prompt.rstrip().rpartition("\n")[2]
        _count(found, "quoted text that the last line repeats", _repeated(quoted, last_line))
        _count(found, "quoted text", quoted)
        _count(found, "number of the last line", NUMBER.findall(last_line))
        _count(found, "number", NUMBER.findall(prompt))
        _count(found, "name in the last line", NAME.findall(last_line)[1:])
        words = list(WORD.finditer(prompt))
        self._after_marks(found, prompt, words)
        _count(found, "word", [match[0] for match in words])
        return found

    def _after_marks(self, found: Places, prompt: str, words: list[re.Match[str]]) -> None:
        """Name the word after each mark, and all that comes after it."""
        end = len(prompt.rstrip(" \n\t.?!\"'"))
        last = {match[0].lower(): i for i, match in enumerate(words)}
        for mark in self._marks:
            if mark in last and last[mark] + 1 < len(words):
                after = words[last[mark] + 1]
                found[f"the word after {mark!r}"] = after[0]
                rest = prompt[after.start() : end]
                if "\n" not in rest:
                    found[f"all after {mark!r}"] = rest


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def _count(found: Places, what: str, texts: Sequence[str]) -> None:
    """Name texts by their number from the front, and from the back."""
    for i, text in enumerate(texts[:MAX_INDEX]):
        found[f"{what} {i + 1}"] = text
    for i, text in enumerate(reversed(texts[-MAX_INDEX:])):
        found[f"{what} {i + 1} from the end"] = text


def _repeated(quoted: Sequence[str], line: str) -> list[str]:
    """Give the quoted texts whose words the line holds, in the order of the line."""
    lowered = f" {' '.join(_words(line))} "
    where = {text: lowered.find(f" {' '.join(_words(text))} ") for text in quoted}
    return sorted((text for text in where if where[text] >= 0), key=lambda text: where[text])
