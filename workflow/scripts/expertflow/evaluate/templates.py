"""Forms of answers: what the prompt holds is replaced by its place there.

A place is named by where it stands: the second word, the last number, ... Places are general on
purpose: nothing here knows what task a prompt belongs to.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

from expertflow.core.records import Record
from expertflow.evaluate.records import Example

MAX_MARKS = 40  # words that places are counted from
MIN_MARK_FRACTION = 0.05  # of the prompts hold such a word
MAX_INDEX = 24  # places further from an end are not named

WORD = re.compile(r"\w+(?:\.\d+)?")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
QUOTED = re.compile(r"\"([^\"\n]+)\"|'([^'\n]+)'|`([^`\n]+)`")
NAME = re.compile(r"[A-Z][\w.'-]*(?: [A-Z][\w.'-]*)*")

# A quoted text counts as one piece where the prompt holds it whole, else its words do.
PIECE = re.compile(r"(?<=\")[^\"\n]+(?=\")|(?<=')[^'\n]+(?=')|\w+(?:\.\d+)?|.", re.DOTALL)
WORD_PIECE = re.compile(r"\w+(?:\.\d+)?|.", re.DOTALL)
CASES: dict[str, Callable[[str], str]] = {
    "": str,
    " in lower case": str.lower,
    " in upper case": str.upper,
}

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


class Slot(Record, frozen=True):
    """A place of the prompt, and how what stands there is written."""

    place: str
    case: str


class Template(Record, frozen=True):
    """Text and slots in turn."""

    parts: tuple[str | Slot, ...]

    def fill(self, places: Places) -> str:
        """Answer a prompt; a place that it lacks stays empty."""
        return "".join(
            part if isinstance(part, str) else CASES[part.case](places.get(part.place, ""))
            for part in self.parts
        )

    def text(self) -> str:
        return "".join(
            part if isinstance(part, str) else f"⟨{part.place}{part.case}⟩" for part in self.parts
        )


class TemplateMaker:
    """Makes a training answer's template. Of several places of a text, it takes the usual one.

    The same holds for text that need not come from the prompt: a piece that more answers have than
    a place explains stays as it is.
    """

    def __init__(self, finder: Finder, examples: Sequence[Example]) -> None:
        self.finder, self.examples = finder, examples
        self._made: dict[str, Template] = {}

    @cached_property
    def _usual(self) -> Counter[str | Slot]:
        usual: Counter[str | Slot] = Counter()
        for example in self.examples:
            slots = self._slots(example.prompt)
            seen: set[str | Slot] = set()
            for piece in _pieces(example.reference, slots):
                seen.add(piece)
                seen.update(slots.get(piece, ()))
            usual.update(seen)
        return usual

    def template(self, example: Example) -> Template:
        if example.document_id not in self._made:
            self._made[example.document_id] = self._make(example)
        return self._made[example.document_id]

    def _make(self, example: Example) -> Template:
        slots = self._slots(example.prompt)
        parts: list[str | Slot] = []
        for piece in _pieces(example.reference, slots):
            choices: list[str | Slot] = [piece, *slots.get(piece, ())]
            part = max(choices, key=lambda choice: self._usual[choice])
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        return Template(tuple(parts))

    def _slots(self, prompt: str) -> dict[str, list[Slot]]:
        """Map each text that a place gives, in each case, to the slots that give it."""
        slots: dict[str, list[Slot]] = {}
        for place, text in self.finder.places(prompt).items():
            for case, written in CASES.items():
                if not case or written(text) != text:
                    slots.setdefault(written(text), []).append(Slot(place, case))
        return slots


def _pieces(answer: str, slots: dict[str, list[Slot]]) -> list[str]:
    pieces: list[str] = []
    for match in PIECE.finditer(answer):
        whole = match[0]
        pieces += [whole] if whole in slots else WORD_PIECE.findall(whole)
    return pieces
