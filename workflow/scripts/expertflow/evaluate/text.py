"""Judge plain text: a final number, or the whole answer; and find the answer in a chatty reply."""

import re
from decimal import Decimal

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.records import Verdict

# A fence opens at the start of a line, as in Markdown, and a reply cut short may never close it.
_FENCE = re.compile(r"^ {0,3}```[^\n`]*\n(.*?)(?:^ {0,3}```|\Z)", re.MULTILINE | re.DOTALL)

# `-$1,234.50`, `$-3`, `.5`. What follows must not go on as a number: `1,5`, `1/2`, `2 3`, `1e5`
# and `3:30` are no single decimal number, and reading only their start would judge by luck.
_NUMBER = re.compile(
    r"[\s*_(]*(?P<sign>[-+]?)\s*[$€£¥]?\s*(?P<late_sign>[-+]?)"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?![0-9]|\s*[-+.,:/^*]?\s*[0-9]|[eE][-+]?[0-9])"
)
_MARKER = "####"


def strip_code_fence(text: str) -> str:
    """Return the content of the first fenced block, or the text itself when there is none.

    A chat model often wraps its answer in a fence with a sentence before it. Counting that as
    wrong would flatter the trained expert against its base model, so prose around it is ignored.
    """
    found = _FENCE.search(text)
    return text if found is None else found[1]


def judge_final_answer(prediction: str, reference: str) -> Verdict:
    """Compare the numbers after the last ``####`` of both texts, exactly: 18 equals 18.00.

    Kinds: ``correct``, ``wrong_answer``, ``no_answer``. Currency, thousands separators, a per cent
    sign and units after the number are ignored.

    Raises:
        EvaluationError: the reference has no final answer.
    """
    wanted = final_answer(reference)
    if wanted is None:
        raise EvaluationError(
            f"the reference has no number after {_MARKER!r}; "
            "end it with '#### 42', or use the task exact_match"
        )
    found = final_answer(prediction)
    if found is None:
        return Verdict(correct=False, kind="no_answer", detail=f"no number after {_MARKER!r}")
    if found != wanted:
        detail = f"answered {found:.12g}, expected {wanted:.12g}"
        return Verdict(correct=False, kind="wrong_answer", detail=detail)
    return Verdict(correct=True, kind="correct")


def final_answer(text: str) -> Decimal | None:
    """Read the number after the last ``####``; nothing else in the text counts as an answer.

    >>> final_answer("9 x 2 = 18 #### $1,018.50")
    Decimal('1018.50')
    """
    _, marker, tail = text.rpartition(_MARKER)
    if not marker:
        return None
    # No number is that long, and the pattern would take quadratic time over a mile of blanks.
    line = tail.partition("\n")[0][:200].replace("\N{MINUS SIGN}", "-")
    found = _NUMBER.match(line)
    if found is None or (found["sign"] and found["late_sign"]):
        return None
    return Decimal(found["sign"] + found["late_sign"] + found["digits"].replace(",", ""))


def judge_exact_match(prediction: str, reference: str) -> Verdict:
    """Compare two texts after folding every run of whitespace into one blank.

    Kinds: ``correct``, ``different``, ``empty``.
    """
    said, wanted = " ".join(prediction.split()), " ".join(reference.split())
    if said == wanted:
        return Verdict(correct=True, kind="correct")
    return Verdict(correct=False, kind="different" if said else "empty")
