"""Final numbers, complete answers, and answers inside a chatty reply."""

from decimal import Decimal

from made_up_documents import score

from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.tasks.exact_match import ExactMatch
from expertflow.evaluate.tasks.final_answer import FinalAnswer, final_answer


def test_final_answer_reads() -> None:
    expected = {
        "9 x 2 = 18\n#### 18": "18",
        "#### 1\nno, wait\n#### 2": "2",
        "#### 18.": "18",
        "#### -3.50 degrees": "-3.5",
        "#### \N{MINUS SIGN}3": "-3",
        "#### $1,234.50": "1234.5",
        "#### -$5": "-5",
        "#### $-5": "-5",
        "#### **70,000** dollars": "70000",
        "####.5": "0.5",
        "#### 50%\nThat is all 7 of them.": "50",
        "####\n18": "18",
        "#### \r\n **18**\r\n5 are left": "18",
        "#### \\$18": "18",
        "#### total= $1,018": "1018",
        "#### 18\n\n#### Explanation\n9 x 2": "18",
        "#### 5\n####": "5",
        "#### 18 of them and that is all": "18",
        "#### 18 to be paid": "18",
        "#### 18 m²": "18",
        "#### 18 xylophones": "18",
        "#### 18 - as asked": "18",
        "#### 18 orders": "18",
        "#### 18 in 2020": "18",
        "so \\boxed{18}": "18",
        "\\boxed{\\$1,018.50}": "1018.5",
        "\\boxed{18\\text{ cm}} is right": "18",
        "the answer is 4\n\\boxed{5}": "5",
        "The final answer is **18**.": "18",
        "**Answer:** $18$": "18",
        "#### 1.8e1": "18",
        "#### 1e5": "100000",
        f"#### {2**100}": str(2**100),
        "#### 1.8 x 10^1 m": "18",
        "\\boxed{1.8 \\times 10^{-1}}": "0.18",
    }
    assert {text: final_answer(text) for text in expected} == {
        text: Decimal(value) for text, value in expected.items()
    }


def test_final_answer_does_not_guess() -> None:
    digits = ("1,5", "1/2", "1e5x", "3:30", "2 3", "3½", "3 ½", "10²", "5k", "3**2", "9" * 300)
    words = ("eighteen", "18 or 20", "18 or twenty", "7 to 9", "7 and 9", "7 and a half")
    factors = ("2 million", "2 Dozen eggs", "3 x 10 = 30", "3×10", "3 x $10", "3 \\times 10")
    pairs = ("18 dollars and 50 cents", "5 hours 30 minutes", "18 apples and 2 pears", "6 ft 2")
    others = ("\n\n18", "-$-5", "7 – 9", "5 - .5", "18\n#### 18 or 20")
    marked = [f"#### {rest}" for rest in (*digits, *words, *factors, *pairs, *others)]
    bare = ("18", "### 18", "", "answering 18", "the answer isn't 18", "18 is the answer")
    boxed = ("The answer is 5: \\boxed{\\frac{1}{2}}", "\\boxed{18 or 20}")
    read = {text: final_answer(text) for text in (*bare, *boxed, *marked)}
    assert {text: value for text, value in read.items() if value is not None} == {}


def test_kinds() -> None:
    numbers = {"so\n#### 18.00": "correct", "so\n#### 19": "wrong_answer", "so 18": "no_answer"}
    texts = {" a\n\tb ": "correct", "A b": "different", "ab": "different", " \n": "empty"}
    for task, reference, kinds in (
        (FinalAnswer, "2 x 9\n#### 18", numbers),
        (ExactMatch, "a b", texts),
    ):
        judged = score(task, list(kinds), reference)
        assert [one.kind for one in judged] == list(kinds.values())


def test_final_answer_takes_linear_time_on_hostile_text() -> None:
    """Quadratic time would take hours."""
    for text in (
        *("#### " + "9" * 100_000, "#### 1" + " " * 100_000 + "x", "#" * 100_000),
        *("####\n" * 20_000, "#### 1" * 16_000, ("####" + " " * 190) * 500, "#### x" * 16_000),
        *("\\boxed{1 " * 16_000, "answer is " * 16_000, "answer: 1 x 10^" * 16_000),
    ):
        final_answer(text)


def test_strip_code_fence() -> None:
    expected = {
        "SELECT 1": "SELECT 1", "```sql\nSELECT 1\n```": "SELECT 1\n",
        "Here it is:\n```\nSELECT 1\n```\nIt counts.": "SELECT 1\n", "```sql\nSELECT 1": "SELECT 1",
        "```\na\n```\nor\n```\nb\n```": "a\n", "`SELECT 1`": "`SELECT 1`",
        "a ```b``` c": "a ```b``` c",
    }  # fmt: skip
    assert {text: strip_code_fence(text) for text in expected} == expected
