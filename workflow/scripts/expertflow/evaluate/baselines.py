"""Baselines without a model, learned from training examples alone.

They show what a score is worth: a model that always gives one answer, or fills in a template, may
look trained. Candidates are judged on probes, training examples that no candidate was learned from.
A template is an answer in which parts of the prompt are replaced by their places: the second word,
the last number, ... Places are generic, as nothing here knows the task of a prompt.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import chain, zip_longest
from math import isqrt, log

import numpy as np

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.evaluate.questions import Judge, unusable
from expertflow.evaluate.records import Example, Judgment

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
MAX_INDEX = 24  # places further from an end are not named

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


class BaselinePredictor(Record, frozen=True, kw_only=True):
    name: str
    description: str
    answer: Answering


class Finder:
    """Finds the texts at all places of a prompt; marks are words that many prompts share."""

    def __init__(self, prompts: Sequence[str]) -> None:
        n_prompts = Counter(word for prompt in prompts for word in set(_words(prompt)))
        least = max(MIN_MARK_FRACTION * len(prompts), 2)
        often = sorted(n_prompts.items(), key=lambda item: (-item[1], item[0]))
        self._marks = [word for word, n in often[:MAX_MARKS] if n >= least]
        # All templates are filled in for a prompt before the next one.
        self.places = lru_cache(maxsize=1)(self._find)

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
        end = len(prompt.rstrip(" \n\t.?!\"'"))
        last = {match[0].lower(): i for i, match in enumerate(words)}
        for mark in self._marks:
            if mark in last and last[mark] + 1 < len(words):
                after = words[last[mark] + 1]
                found[f"the word after {mark!r}"] = after[0]
                rest = prompt[after.start() : end]
                if "\n" not in rest:
                    found[f"all after {mark!r}"] = rest
        _count(found, "word", [match[0] for match in words])
        return found


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def _count(found: Places, what: str, texts: Sequence[str]) -> None:
    for i, text in enumerate(texts[:MAX_INDEX]):
        found[f"{what} {i + 1}"] = text
    for i, text in enumerate(reversed(texts[-MAX_INDEX:])):
        found[f"{what} {i + 1} from the end"] = text


def _repeated(quoted: Sequence[str], line: str) -> list[str]:
    lowered = f" {' '.join(_words(line))} "
    where = {text: lowered.find(f" {' '.join(_words(text))} ") for text in quoted}
    return sorted((text for text in where if where[text] >= 0), key=lambda text: where[text])


class Slot(Record, frozen=True):
    place: str
    case: str


class Template(Record, frozen=True):
    parts: tuple[str | Slot, ...]

    def fill(self, places: Places) -> str:
        return "".join(
            part if isinstance(part, str) else CASES[part.case](places.get(part.place, ""))
            for part in self.parts
        )

    def answering(self, finder: Finder) -> Answering:
        return lambda example: self.fill(finder.places(example.prompt))


class TemplateMaker:
    """Turns answers into templates; text that is more common than its places stays literal."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        self.finder = Finder([example.prompt for example in examples])
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


def make_baselines(judge: Judge, training: Sequence[Example], seed: int) -> list[BaselinePredictor]:
    """Learn the baselines: none from fewer than four examples, no ``template`` if none recurs."""
    usable = [example for example in training if example.reference.strip()]
    if len(usable) < 4:
        return []
    order = np.random.default_rng(seed).permutation(len(usable)).tolist()
    n_probes = min(MAX_PROBES, len(usable) // 4)
    probes = _Probes([usable[i] for i in order[:n_probes]], judge)
    fitted = [usable[i] for i in sorted(order[n_probes:])]
    maker = TemplateMaker(fitted)
    return [_constant(fitted, probes), *_template(maker, probes), *_nearest(maker)]


class _Probes:
    def __init__(self, examples: list[Example], judge: Judge) -> None:
        self._examples, self._judge = examples, judge

    def best(self, candidates: Sequence[Answering]) -> int:
        if len(candidates) == 1:
            return 0
        asked = self._examples[: max(N_JUDGMENTS // len(candidates), 1)]
        try:
            judgments = self._judged(asked, candidates)
        except EvaluationError:
            # Unusable references say nothing about a candidate.
            bad = unusable(asked, self._judge)
            asked = [example for i, example in enumerate(asked) if i not in bad]
            if not asked:
                raise
            judgments = self._judged(asked, candidates)
        correct = np.array([judgment.correct for judgment in judgments])
        return int(correct.reshape(len(candidates), len(asked)).sum(axis=1).argmax())

    def _judged(self, asked: list[Example], candidates: Sequence[Answering]) -> list[Judgment]:
        answers = [answer(example) for answer in candidates for example in asked]
        return self._judge(asked * len(candidates), answers)


def _constant(fitted: Sequence[Example], probes: _Probes) -> BaselinePredictor:
    def always(text: str) -> Answering:
        return lambda _: text

    texts = _constants(fitted, isqrt(N_JUDGMENTS // 2))
    answers = [always(text) for text in texts]
    best = probes.best(answers)
    what = f"always answers {_shown(texts[best])}"
    return BaselinePredictor(name="constant", description=what, answer=answers[best])


def _constants(fitted: Sequence[Example], n: int) -> list[str]:
    """Pick alternately from three orders: frequent answers, frequent endings, and all answers."""
    texts = Counter(example.reference for example in fitted)
    ends = Counter(_last_word(example.reference) for example in fitted)
    often = [text for text, count in texts.most_common() if count > 1]
    ending = {end: "" for end, count in ends.most_common() if count > 1}
    for text in sorted(texts, key=len, reverse=True):
        if _last_word(text) in ending:
            ending[_last_word(text)] = text  # the shortest of its ending
    step = max(len(texts) // n, 1)
    orders = ([*often], [*ending.values()], [*texts][::step])
    in_turn = chain.from_iterable(zip_longest(*orders))
    return list(dict.fromkeys(text for text in in_turn if text is not None))[:n]


def _last_word(text: str) -> str:
    return text.split()[-1]


def _template(maker: TemplateMaker, probes: _Probes) -> list[BaselinePredictor]:
    """Judge the recurring templates with the most exact matches, which cost no judgment."""
    counts = Counter(maker.template(example) for example in maker.examples)
    often = [form for form, count in counts.most_common(MAX_TEMPLATES) if count > 1]
    if not often:
        return []
    exact = dict.fromkeys(often, 0)
    for example in maker.examples:
        places = maker.finder.places(example.prompt)
        for form in often:
            exact[form] += form.fill(places) == example.reference
    ranked = sorted(often, key=lambda form: -exact[form])[:N_JUDGED_TEMPLATES]
    answers = [form.answering(maker.finder) for form in ranked]
    best = probes.best(answers)
    text = "".join(
        part if isinstance(part, str) else f"⟨{part.place}{part.case}⟩"
        for part in ranked[best].parts
    )
    what = f"fills in {_shown(text)}"
    return [BaselinePredictor(name="template", description=what, answer=answers[best])]


def _nearest(maker: TemplateMaker) -> list[BaselinePredictor]:
    """Answer like the nearest question, verbatim and filled in, without choosing between the two.

    Probes cannot choose: a probe may share a group with a fitted example, whose verbatim answer is
    then right by chance. Held-out questions never do.
    """
    index = Index([example.prompt for example in maker.examples])

    def nearest(example: Example) -> Example:
        return maker.examples[index.nearest(example.prompt)]

    def filled_in(example: Example) -> str:
        return maker.template(nearest(example)).fill(maker.finder.places(example.prompt))

    given = "answers as the training question with the most like words (TF-IDF)"
    filled = (
        f"{given}, with words of its prompt replaced by those at the same places of the new one"
    )
    return [
        BaselinePredictor(
            name="nearest", description=given, answer=lambda example: nearest(example).reference
        ),
        BaselinePredictor(name="nearest_filled", description=filled, answer=filled_in),
    ]


class Index:
    """TF-IDF index with cosine similarity; the first of equally near texts wins."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [_count_words(text) for text in texts]
        n_texts = Counter(word for count in counts for word in count)
        self._rarity = {word: log(len(texts) / n) for word, n in n_texts.items()}
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for i, count in enumerate(counts):
            weights = {word: self._weight(word, n) for word, n in count.items()}
            length = sum(weight**2 for weight in weights.values()) ** 0.5 or 1.0
            for word, weight in weights.items():
                found[word].append((i, weight / length))
        self._n = len(texts)
        self._found = {
            word: tuple(map(np.array, zip(*at, strict=True))) for word, at in found.items()
        }

    def nearest(self, text: str) -> int:
        likeness = np.zeros(self._n)
        for word, n in sorted(_count_words(text).items()):
            if word in self._found:
                where, weights = self._found[word]
                likeness[where] += weights * self._weight(word, n)
        return int(likeness.argmax())

    def _weight(self, word: str, n: int) -> float:
        return (1 + log(n)) * self._rarity[word]


def _count_words(text: str) -> Counter[str]:
    return Counter(_PLAIN_WORD.findall(text.lower()))


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= N_SHOWN_CHARACTERS else f"{line[: N_SHOWN_CHARACTERS - 1]}…"
