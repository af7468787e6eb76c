"""Judge complete answers as text."""

from expertflow.evaluate.records import Example, Judgment
from expertflow.evaluate.scoring import ScoringTask


class ExactMatch(ScoringTask):
    """Compare texts with whitespace folded; kinds: ``correct``, ``different``, ``empty``."""

    metric = "exact_match"

    def judge(self, example: Example, answer: str) -> Judgment:
        found, wanted = answer.split(), example.reference.split()
        if found == wanted:
            return Judgment("correct")
        return Judgment("different" if found else "empty")
