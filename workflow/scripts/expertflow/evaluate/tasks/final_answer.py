"""Judge a final number in plain text."""

import re
from collections import deque
from decimal import Decimal

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.records import Example, Judgment
from expertflow.evaluate.scoring import ScoringTask

# `-$1,234.50`, `$-3`, `.5`, `x = 7`, and one line break before it. Repetitions are possessive and
# bounded, so that hostile text takes linear time.
_BLANK = r"[^\S\n]"
_MARKS = rf"(?:{_BLANK}|[*_(])" + "{0,200}+"
_CURRENCY = r"\\?[$€£¥]"
_MARKER = "####"
_BOX = "\\boxed{"
_MARK = (
    rf"(?:{_MARKER}(?!#)|{re.escape(_BOX)}|"
    rf"(?i:answer(?:{_BLANK}{{1,9}}+is(?![^\W_])|(?=[*_]{{0,2}}:))[:*_]{{0,9}}+))"
)
_NUMBER = re.compile(
    rf"{_MARK}{_MARKS}(?:\n{_MARKS})?(?:[A-Za-z]\w{{0,30}}+{_BLANK}{{0,9}}+={_MARKS})?"
    rf"(?P<sign>[-+−]?){_BLANK}{{0,9}}+(?:{_CURRENCY})?{_BLANK}{{0,9}}+(?P<late_sign>[-+−]?)"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3}){1,50}|[0-9]{1,200})(?:\.[0-9]{1,200})?|\.[0-9]{1,200})"
    rf"(?:[eE](?P<e>[-+]?[0-9]{{1,3}})(?!\w)|{_BLANK}{{0,9}}+(?:[x×*]|\\times){_BLANK}{{0,9}}+10"
    r"(?:\^\{?|\*\*)(?P<power>[-+−]?[0-9]{1,3})(?![0-9])\}?)?"
)
# Not a single decimal number: `1,5`, `1/2`, `2 3`, `3:30`, `3 x 10 = 30`, `7–9`, `3½`, `18 or 20`,
# `2 million`, `18 dollars and 50 cents`. Reading only their start would judge by chance.
_ALSO = rf"{_BLANK}*+[-+−]?(?:{_CURRENCY})?{_BLANK}*+\.?[0-9]"
_PARTS = "½¼¾⅐-⅞"
_OPERATORS = r"(?:[-+−/^x×÷·‐-―]|\*{1,2})"
_COMPOUND = (
    "(?:dollars?|euros?|pounds?|lbs?|feet|foot|ft|yards?|years?|months?|weeks?|days?|hours?|hrs?|h"
    "|minutes?|min|degrees?)(?![A-Za-z])"
)
_CONTINUES = re.compile(
    rf"[0-9²³¹⁰-⁹]|e[-+]?[0-9]|k(?![A-Za-z])|{_BLANK}*+(?:"
    rf"[{_PARTS}]|[.,:'’_]?{_BLANK}*+[0-9]|{_OPERATORS}{_ALSO}|"
    r"\\(?:times|cdot|div|pm|[dt]?frac)(?![A-Za-z])|"
    r"-?(?:or|dozen|hundred|thousand|million|billion|trillion)(?![^\W_])|"
    rf"[A-Za-z]{{1,30}}+{_BLANK}++and{_ALSO}|{_COMPOUND}{_ALSO}|"
    rf"(?:to|and|times|plus|minus)(?:{_ALSO}|"
    rf"{_BLANK}++(?:a{_BLANK}++)?(?:half|third|quarter)(?![^\W_])))",
    re.IGNORECASE,
)


class FinalAnswer(ScoringTask):
    """Compare the numbers that both texts end with, exactly: 18 equals 18.00.

    Kinds: ``correct``, ``wrong_answer``, ``no_answer``. Currency, thousands separators, a percent
    sign and units after the number are ignored; see ``final_answer``.
    """

    metric = "final_answer_accuracy"

    def judge(self, example: Example, answer: str) -> Judgment:
        wanted = final_answer(example.reference)
        if wanted is None:
            raise EvaluationError(
                f"the reference has no standalone number after {_MARKER!r}; "
                "end it with '#### 42', or use the task exact_match"
            )
        found = final_answer(answer)
        if found is None:
            return Judgment("no_answer", f"no standalone number after {_MARKER!r}")
        if found != wanted:
            return Judgment("wrong_answer", f"answered {found:.12g}, expected {wanted:.12g}")
        return Judgment("correct")


def final_answer(text: str) -> Decimal | None:
    r"""Return the number after the last mark that a number follows, on its line or the next.

    Marks are ``####``, ``\boxed{``, ``answer is`` and ``answer:``. There is none if the number
    continues (``18 or 20``, ``3 x 10 = 30``, ``2 million``), or if the last box has none.

    >>> final_answer("9 x 2 = 18 #### $1,018.50")
    Decimal('1018.50')
    """
    for found in deque(_NUMBER.finditer(text), maxlen=1):  # the last, if any
        if (found["sign"] and found["late_sign"]) or _CONTINUES.match(text, found.end()):
            return None
        if text.rfind(_BOX) > found.start():
            return None
        exponent = int((found["e"] or found["power"] or "0").replace("\N{MINUS SIGN}", "-"))
        sign = (found["sign"] + found["late_sign"]).replace("\N{MINUS SIGN}", "-")
        # In the text: scaleb would round to 28 digits.
        return Decimal(f"{sign}{found['digits'].replace(',', '')}E{exponent}")
    return None
