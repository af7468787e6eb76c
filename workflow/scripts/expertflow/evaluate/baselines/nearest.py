"""Find the text with the most like words, by TF-IDF and the cosine of the two."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

WORD = re.compile(r"\w+")


class Index:
    """Texts by their words. Of equally near texts the first is the nearest."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_words(text)) for text in texts]
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
        """Give the place of the text that is most like this one."""
        likeness = np.zeros(self._n)
        for word, n in sorted(Counter(_words(text)).items()):
            if word in self._found:
                where, weights = self._found[word]
                likeness[where] += weights * self._weight(word, n)
        return int(likeness.argmax())

    def _weight(self, word: str, n: int) -> float:
        return (1 + log(n)) * self._rarity[word]


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
