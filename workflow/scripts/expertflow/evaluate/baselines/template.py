"""Learn forms: answers in which what the prompt holds is replaced by its place there."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

from expertflow.core.records import Record
from expertflow.evaluate.baselines.places import Finder, Places
from expertflow.evaluate.records import Example

# A quoted text counts as one piece where the prompt holds it whole, else its words do.
PIECE = re.compile(r"(?<=\")[^\"\n]+(?=\")|(?<=')[^'\n]+(?=')|\w+(?:\.\d+)?|.", re.DOTALL)
WORD_PIECE = re.compile(r"\w+(?:\.\d+)?|.", re.DOTALL)
CASES: dict[str, Callable[[str], str]] = {
    "": str,
    " in lower case": str.lower,
    " in upper case": str.upper,
}


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
        """Write the form for a reader."""
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
        """Make the template of an example's reference."""
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
    """Cut an answer into pieces; put together they are the answer."""
    pieces: list[str] = []
    for match in PIECE.finditer(answer):
        whole = match[0]
        pieces += [whole] if whole in slots else WORD_PIECE.findall(whole)
    return pieces
