"""Baselines without a model, learned from training examples alone.

They show what a score is worth: a model that always gives one answer, or fills in a template, may
look trained. Candidates are judged on probes, training examples that no candidate was learned from.
A template is an answer in which parts of the prompt are replaced by their places: the second word,
the last number, ... Places are generic, because nothing here knows a prompt's task.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import chain, zip_longest
from math import isqrt, log

import numpy as np

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.evaluate.questions import Judge, find_unusable
from expertflow.evaluate.records import Example

# Budget of judgments for learning constants, and for templates.
N_JUDGMENTS = 400
MAX_PROBES = 200
MAX_TEMPLATES = 200  # filled in for all examples
# Few templates are judged, so that each gets many probes: with 14 candidates and 28 probes the
# choice on WikiSQL scored half of what another one did.
N_JUDGED_TEMPLATES = 4
N_SHOWN_CHARACTERS = 160
_PLAIN_WORD = re.compile(r"\w+")
MAX_MARKS = 40  # frequent words that places may follow
MIN_MARK_FRACTION = 0.05  # of the prompts contain such a word
MAX_INDEX = 24  # places farther from an end are not named

WORD = re.compile(r"\w+(?:\.\d+)?")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
QUOTED = re.compile(r"\"([^\"\n]+)\"|'([^'\n]+)'|`([^`\n]+)`")
NAME = re.compile(r"[A-Z][\w.'-]*(?: [A-Z][\w.'-]*)*")

# A quoted text is one piece if the prompt contains all of it; otherwise its words are.
PIECE = re.compile(r"(?<=\")[^\"\n]+(?=\")|(?<=')[^'\n]+(?=')|\w+(?:\.\d+)?|.", re.DOTALL)
WORD_PIECE = re.compile(r"\w+(?:\.\d+)?|.", re.DOTALL)
CASES: dict[str, Callable[[str], str]] = {
    "": str,
    " in lower case": str.lower,
    " in upper case": str.upper,
}

# Texts of a prompt by the names of their places, in order of preference.
Places = dict[str, str]
Answering = Callable[[Example], str]


class BaselinePredictor(Record, frozen=True):
    name: str
    description: str
    answer: Answering


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def _repeated(quoted: Sequence[str], line: str) -> list[str]:
    lowered = f" {' '.join(_words(line))} "
    where = {text: lowered.find(f" {' '.join(_words(text))} ") for text in quoted}
    return sorted((text for text in where if where[text] >= 0), key=lambda text: where[text])


class Slot(Record, frozen=True):
    place: str
    case: str


Template = tuple[str | Slot, ...]


class TemplateMaker:
    """Turns answers into templates; text that is more common than its places stays literal.

    Marks are words that many prompts share.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        n_prompts = Counter(word for example in examples for word in set(_words(example.prompt)))
        least = max(MIN_MARK_FRACTION * len(examples), 2)
        often = sorted(n_prompts.items(), key=lambda item: (-item[1], item[0]))
        self._marks = [word for word, n in often[:MAX_MARKS] if n >= least]
        # All templates are filled in for a prompt before the next one.
        self._find_places = lru_cache(maxsize=1)(self._find)
        self._usual: Counter[str | Slot] = Counter()
        for example in examples:
            slots = self._slots(example.prompt)
            pieces = _pieces(example.reference, slots)
            # Counts how often each text, and each place, is part of an answer.
            self._usual.update({*pieces, *(slot for one in pieces for slot in slots.get(one, ()))})
        self.find_template = cache(self._make)

    def answer_with(self, template: Template, example: Example) -> str:
        places = self._find_places(example.prompt)
        return "".join(
            part if isinstance(part, str) else CASES[part.case](places.get(part.place, ""))
            for part in template
        )

    def _make(self, prompt: str, reference: str) -> Template:
        slots = self._slots(prompt)
        parts: list[str | Slot] = []
        for piece in _pieces(reference, slots):
            # The text itself is first, so it wins a tie with its places.
            choices: list[str | Slot] = [piece, *slots.get(piece, ())]
            part = max(choices, key=lambda choice: self._usual[choice])
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        return tuple(parts)

    def _find(self, prompt: str) -> Places:
        found: Places = {}

        def add(what: str, texts: Sequence[str]) -> None:
            for i, text in enumerate(texts[:MAX_INDEX]):
                found[f"{what} {i + 1}"] = text
            for i, text in enumerate(reversed(texts[-MAX_INDEX:])):
                found[f"{what} {i + 1} from the end"] = text

        quoted = [next(filter(None, match.groups())) for match in QUOTED.finditer(prompt)]
        last_line = prompt.rstrip().rpartition("\n")[2]
        add("quoted text that the last line repeats", _repeated(quoted, last_line))
        add("quoted text", quoted)
        add("number of the last line", NUMBER.findall(last_line))
        add("number", NUMBER.findall(prompt))
        add("name in the last line", NAME.findall(last_line)[1:])
        words = list(WORD.finditer(prompt))
        end = len(prompt.rstrip(" \n\t.?!\"'"))
        last = {match[0].lower(): i for i, match in enumerate(words)}
        for mark in self._marks:
            if mark in last and last[mark] + 1 < len(words):
                after = words[last[mark] + 1]
                found[f"the word after {mark!r}"] = after[0]
                rest = prompt[after.start() : end]
                if "\n" not in rest:
                    found[f"everything after {mark!r}"] = rest
        add("word", [match[0] for match in words])
        return found

    def _slots(self, prompt: str) -> dict[str, list[Slot]]:
        slots: dict[str, list[Slot]] = {}
        for place, text in self._find_places(prompt).items():
            for case, written in CASES.items():
                if not case or written(text) != text:  # else the same as without a case
                    slots.setdefault(written(text), []).append(Slot(place, case))
        return slots


def _pieces(answer: str, slots: dict[str, list[Slot]]) -> list[str]:
    pieces: list[str] = []
    for match in PIECE.finditer(answer):
        whole = match[0]
        pieces += [whole] if whole in slots else WORD_PIECE.findall(whole)
    return pieces


def make_baselines(judge: Judge, training: Sequence[Example], seed: int) -> list[BaselinePredictor]:
    """Learn the baselines: none from fewer than four examples, no ``template`` if none recurs."""
    usable = [example for example in training if example.reference.strip()]
    if len(usable) < 4:
        return []
    order = np.random.default_rng(seed).permutation(len(usable)).tolist()
    n_probes = min(MAX_PROBES, len(usable) // 4)
    probes = [usable[i] for i in order[:n_probes]]
    fitted = [usable[i] for i in sorted(order[n_probes:])]
    maker = TemplateMaker(fitted)

    texts = _constants(fitted, isqrt(N_JUDGMENTS // 2))
    constant = texts[_best(judge, probes, [[text] * n_probes for text in texts])]
    description = f"always answers {_shown(constant)}"
    found = [BaselinePredictor("constant", description, lambda _: constant)]
    if forms := _frequent_templates(maker):
        answers = [[maker.answer_with(form, probe) for probe in probes] for form in forms]
        best = forms[_best(judge, probes, answers)]
        parts = (x if isinstance(x, str) else f"⟨{x.place}{x.case}⟩" for x in best)
        description = f"fills in {_shown(''.join(parts))}"
        found.append(BaselinePredictor("template", description, partial(maker.answer_with, best)))
    return [*found, *_nearest(maker)]


def _best(judge: Judge, probes: Sequence[Example], candidates: Sequence[list[str]]) -> int:
    if len(candidates) == 1:
        return 0
    # All candidates share one budget of judgments: more candidates, fewer probes each.
    asked = range(min(len(probes), max(N_JUDGMENTS // len(candidates), 1)))

    def find_best(asked: Sequence[int]) -> int:
        # Probe by probe: a judge may prepare a reference once for all answers that follow.
        answers = [candidate[i] for i in asked for candidate in candidates]
        judgments = judge([probes[i] for i in asked for _ in candidates], answers)
        correct = np.array([judgment.correct for judgment in judgments])
        return int(correct.reshape(len(asked), len(candidates)).sum(axis=0).argmax())

    try:
        return find_best(asked)
    except EvaluationError:
        # Unusable references say nothing about a candidate.
        bad = find_unusable([probes[i] for i in asked], judge)
        if len(bad) == len(asked):
            raise
        return find_best([i for i in asked if i not in bad])


def _constants(fitted: Sequence[Example], n: int) -> list[str]:
    """Pick alternately from three orders: frequent answers, frequent endings, and all answers."""
    texts = Counter(example.reference for example in fitted)
    ends = Counter(example.reference.split()[-1] for example in fitted)
    often = [text for text, count in texts.most_common() if count > 1]
    ending = {end: "" for end, count in ends.most_common() if count > 1}
    for text in sorted(texts, key=len, reverse=True):
        if (end := text.split()[-1]) in ending:
            ending[end] = text  # the shortest of its ending
    step = max(len(texts) // n, 1)
    orders = ([*often], [*ending.values()], [*texts][::step])
    in_turn = chain.from_iterable(zip_longest(*orders))
    return list(dict.fromkeys(text for text in in_turn if text is not None))[:n]


def _frequent_templates(maker: TemplateMaker) -> list[Template]:
    """Return the recurring templates with the most exact matches, which cost no judgment."""
    counts = Counter(maker.find_template(one.prompt, one.reference) for one in maker.examples)
    often = [form for form, count in counts.most_common(MAX_TEMPLATES) if count > 1]
    exact = dict.fromkeys(often, 0)
    for example in maker.examples:
        for form in often:
            exact[form] += maker.answer_with(form, example) == example.reference
    return sorted(often, key=lambda form: -exact[form])[:N_JUDGED_TEMPLATES]


def _nearest(maker: TemplateMaker) -> list[BaselinePredictor]:
    """Answer like the nearest question, verbatim and filled in, without choosing between the two.

    Probes cannot choose: a probe may share a group with a fitted example, whose verbatim answer is
    then right by chance. Held-out questions never do.
    """
    index = Index(maker.examples)

    def fill_in(example: Example) -> str:
        near = index.find_nearest(example.prompt)
        return maker.answer_with(maker.find_template(near.prompt, near.reference), example)

    given = "gives the answer of the most similar training question (TF-IDF)"
    filled = (
        f"{given}, with words of its prompt replaced by those in the same places of the new one"
    )
    return [
        BaselinePredictor("nearest", given, lambda one: index.find_nearest(one.prompt).reference),
        BaselinePredictor("nearest_filled", filled, fill_in),
    ]


class Index:
    """TF-IDF index of prompts with cosine similarity; the first of equally near ones wins."""

    def __init__(self, examples: Sequence[Example]) -> None:
        counts = [_count_words(example.prompt) for example in examples]
        n_texts = Counter(word for count in counts for word in count)
        self._rarity = {word: log(len(examples) / n) for word, n in n_texts.items()}
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for i, count in enumerate(counts):
            weights = {word: self._weight(word, n) for word, n in count.items()}
            length = sum(weight**2 for weight in weights.values()) ** 0.5 or 1.0
            for word, weight in weights.items():
                found[word].append((i, weight / length))
        self._examples = examples
        self._found = {
            word: tuple(map(np.array, zip(*at, strict=True))) for word, at in found.items()
        }

    def find_nearest(self, prompt: str) -> Example:
        likeness = np.zeros(len(self._examples))
        # Sorted, because the sum of floats depends on their order.
        for word, n in sorted(_count_words(prompt).items()):
            if word in self._found:
                where, weights = self._found[word]
                likeness[where] += weights * self._weight(word, n)
        return self._examples[int(likeness.argmax())]

    def _weight(self, word: str, n: int) -> float:
        return (1 + log(n)) * self._rarity[word]


def _count_words(text: str) -> Counter[str]:
    return Counter(_PLAIN_WORD.findall(text.lower()))


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= N_SHOWN_CHARACTERS else f"{line[: N_SHOWN_CHARACTERS - 1]}…"
