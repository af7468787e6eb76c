"""What answering without a model reaches: learnt from training examples alone, never from held-out.

A score means little without these: a model that says one thing to everybody, or fills in a form,
may look trained. Each has a part of the training examples to learn from; candidates are judged on
another part of them, the probes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from math import isqrt, log

import numpy as np
from numpy.typing import NDArray

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.evaluate.questions import Judge, unusable
from expertflow.evaluate.records import Example, Verdict
from expertflow.evaluate.templates import Finder, Template, TemplateMaker

# All that learning may ask of the judge.
MAX_JUDGEMENTS = 800
MAX_PROBES = 200
MAX_TEMPLATES = 200  # that are filled in for all examples
# Templates left for the judge. Few, so that each sees many probes: with 14 candidates of 28 probes
# the choice on WikiSQL was one that scored half of what a neighbour did.
N_JUDGED_TEMPLATES = 4
N_SHOWN_CHARACTERS = 160
_WORD = re.compile(r"\w+")

Answer = Callable[[Example], str]


class Baseline(Record, frozen=True, kw_only=True):
    name: str
    description: str
    answer: Answer


def make_baselines(
    judge: Judge, training: Sequence[Example], seed: int, *, max_judgements: int = MAX_JUDGEMENTS
) -> list[Baseline]:
    """Learn ``constant``, ``template``, ``nearest`` and ``nearest_filled`` from examples.

    A pure function of its arguments. ``max_judgements`` bounds how many answers ``judge`` is
    shown, for tasks where that is dear. Fewer than four examples give no baseline, and answers
    that share no form no ``template``.
    """
    usable = [example for example in training if example.reference.strip()]
    if len(usable) < 4:
        return []
    order = np.random.default_rng(seed).permutation(len(usable)).tolist()
    n_probes = min(MAX_PROBES, len(usable) // 4)
    probes = _Probes([usable[i] for i in order[:n_probes]], judge, max_judgements // 2)
    fitted = [usable[i] for i in sorted(order[n_probes:])]
    finder = Finder([example.prompt for example in fitted])
    maker = TemplateMaker(finder, fitted)
    form = _template(maker, fitted, probes)
    return [_constant(fitted, probes), *([form] if form else []), *_nearest(maker)]


class _Probes:
    """Training examples that candidates are judged on; no candidate was learnt from them."""

    def __init__(self, examples: list[Example], judge: Judge, n_judgements: int) -> None:
        self._examples, self._judge = examples, judge
        self._n_judgements = max(n_judgements, 2)

    def most_candidates(self) -> int:
        return max(isqrt(self._n_judgements // 2), 2)

    def best(self, candidates: Sequence[Answer]) -> int:
        if len(candidates) == 1:
            return 0
        asked = self._examples[: max(self._n_judgements // len(candidates), 1)]
        try:
            verdicts = self._judged(asked, candidates)
        except EvaluationError:
            # A reference that cannot be judged tells nothing of a candidate, and costs no other.
            bad = unusable(asked, self._judge)
            asked = [example for i, example in enumerate(asked) if i not in bad]
            if not asked:
                raise
            verdicts = self._judged(asked, candidates)
        correct = np.array([verdict.correct for verdict in verdicts])
        return int(correct.reshape(len(candidates), len(asked)).sum(axis=1).argmax())

    def _judged(self, asked: list[Example], candidates: Sequence[Answer]) -> list[Verdict]:
        answers = [answer(example) for answer in candidates for example in asked]
        return self._judge(asked * len(candidates), answers)


def _constant(fitted: Sequence[Example], probes: _Probes) -> Baseline:
    texts = _constants(fitted, probes.most_candidates())
    text = texts[probes.best([_always(text) for text in texts])]
    return Baseline(
        name="constant", description=f"always answers {_shown(text)}", answer=_always(text)
    )


def _constants(fitted: Sequence[Example], n: int) -> list[str]:
    """Pick answers in turn from three orders: often given, ending as many do, and any."""
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


def _always(text: str) -> Answer:
    return lambda _: text


def _template(maker: TemplateMaker, fitted: Sequence[Example], probes: _Probes) -> Baseline | None:
    """Take the best of the forms that come again; what they get right to the letter is free."""
    counts = Counter(maker.template(example) for example in fitted)
    often = [form for form, count in counts.most_common(MAX_TEMPLATES) if count > 1]
    if not often:
        return None
    exact = dict.fromkeys(often, 0)
    for example in fitted:
        places = maker.finder.places(example.prompt)
        for form in often:
            exact[form] += form.fill(places) == example.reference
    ranked = sorted(often, key=lambda form: -exact[form])[:N_JUDGED_TEMPLATES]
    form = ranked[probes.best([_filling(form, maker.finder) for form in ranked])]
    return Baseline(
        name="template",
        description=f"fills in {_shown(form.text())}",
        answer=_filling(form, maker.finder),
    )


def _filling(form: Template, finder: Finder) -> Answer:
    return lambda example: form.fill(finder.places(example.prompt))


def _nearest(maker: TemplateMaker) -> list[Baseline]:
    """Answer as the nearest question, as it stands and filled in; nothing is chosen here.

    Probes could not choose: they may come from the same group as a fitted example, whose answer
    then happens to serve as it is, and held-out questions never do.
    """
    index = Index([example.prompt for example in maker.examples])

    def as_given(example: Example) -> str:
        return maker.examples[index.nearest(example.prompt)].reference

    def filled_in(example: Example) -> str:
        form = maker.template(maker.examples[index.nearest(example.prompt)])
        return form.fill(maker.finder.places(example.prompt))

    given = "answers as the training question with the most like words (TF-IDF)"
    filled = (
        f"{given}, with words of its prompt replaced by those at the same places of the new one"
    )
    return [
        Baseline(name="nearest", description=given, answer=as_given),
        Baseline(name="nearest_filled", description=filled, answer=filled_in),
    ]


class Index:
    """Texts by TF-IDF and the cosine of two. Of equally near texts the first is the nearest."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_WORD.findall(text.lower())) for text in texts]
        n_texts = Counter(word for count in counts for word in count)
        self._rarity = {word: log(len(texts) / n) for word, n in n_texts.items()}
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for i, count in enumerate(counts):
            weights = {word: self._weight(word, n) for word, n in count.items()}
            length = sum(weight**2 for weight in weights.values()) ** 0.5 or 1.0
            for word, weight in weights.items():
                found[word].append((i, weight / length))
        self._n = len(texts)
        self._found: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {
            word: (np.array([i for i, _ in pairs]), np.array([weight for _, weight in pairs]))
            for word, pairs in found.items()
        }

    def nearest(self, text: str) -> int:
        likeness = np.zeros(self._n)
        for word, n in sorted(Counter(_WORD.findall(text.lower())).items()):
            if word in self._found:
                where, weights = self._found[word]
                likeness[where] += weights * self._weight(word, n)
        return int(likeness.argmax())

    def _weight(self, word: str, n: int) -> float:
        return (1 + log(n)) * self._rarity[word]


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= N_SHOWN_CHARACTERS else f"{line[: N_SHOWN_CHARACTERS - 1]}…"
