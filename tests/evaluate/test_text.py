"""Final numbers, complete answers, and answers inside a chatty reply."""

import time
from decimal import Decimal

import pytest
from made_up_documents import score

from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.scoring import ScoringTask
from expertflow.evaluate.tasks.exact_match import ExactMatch
from expertflow.evaluate.tasks.final_answer import FinalAnswer, final_answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9 x 2 = 18\n#### 18", "18"),
        ("#### 1\nno, wait\n#### 2", "2"),
        ("#### 18.", "18"),
        ("#### -3.50 degrees", "-3.5"),
        ("#### \N{MINUS SIGN}3", "-3"),
        ("#### $1,234.50", "1234.5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### **70,000** dollars", "70000"),
        ("####.5", "0.5"),
        ("#### 50%\nThat is all 7 of them.", "50"),
        ("####\n18", "18"),
        ("#### \r\n **18**\r\n5 are left", "18"),
        ("#### \\$18", "18"),
        ("#### total= $1,018", "1018"),
        ("#### 18\n\n#### Explanation\n9 x 2", "18"),
        ("#### 5\n####", "5"),
        ("#### 18 of them and that is all", "18"),
        ("#### 18 to be paid", "18"),
        ("#### 18 m²", "18"),
        ("#### 18 xylophones", "18"),
        ("#### 18 - as asked", "18"),
        ("#### 18 orders", "18"),
    ],
)
def test_final_answer_reads(text: str, value: str) -> None:
    assert final_answer(text) == Decimal(value)


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 18",
        "### 18",
        "#### eighteen",
        "####\n\n18",
        "#### 1,5",
        "#### 1/2",
        "#### 1e5",
        "#### 3:30",
        "#### 2 3",
        "#### -$-5",
        "#### 3 x 10 = 30",
        "#### 3×10",
        "#### 3 x $10",
        "#### 3 \\times 10",
        "#### 3**2",
        "#### 18 or 20",
        "#### 18 or twenty",
        "#### 7 – 9",
        "#### 7 to 9",
        "#### 7 and 9",
        "#### 7 and a half",
        "#### 3½",
        "#### 3 ½",
        "#### 10²",
        "#### 5k",
        "#### 2 million",
        "#### 2 Dozen eggs",
        "#### 5 - .5",
        "#### 18\n#### 18 or 20",
        "#### " + "9" * 300,
        "",
    ],
)
def test_final_answer_does_not_guess(text: str) -> None:
    assert final_answer(text) is None


@pytest.mark.parametrize(
    ("task", "prediction", "reference", "kind"),
    [
        (FinalAnswer, "so\n#### 18.00", "2 x 9\n#### 18", "correct"),
        (FinalAnswer, "so\n#### 19", "2 x 9\n#### 18", "wrong_answer"),
        (FinalAnswer, "so 18", "2 x 9\n#### 18", "no_answer"),
        (ExactMatch, " a\n\tb ", "a b", "correct"),
        (ExactMatch, "A b", "a b", "different"),
        (ExactMatch, "ab", "a b", "different"),
        (ExactMatch, " \n", "a b", "empty"),
    ],
)
def test_kinds(task: type[ScoringTask], prediction: str, reference: str, kind: str) -> None:
    assert [one.kind for one in score(task, [prediction], reference)] == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "#### " + "9" * 1_000_000,
        "#### 1" + " " * 1_000_000 + "x",
        "#" * 1_000_000,
        "####\n" * 200_000,
        "#### 1" * 160_000,
        ("####" + " " * 190) * 5_000,
        "#### x" * 160_000,
    ],
)
def test_final_answer_is_quick_on_hostile_text(text: str) -> None:
    started = time.perf_counter()
    final_answer(text)
    # Quadratic time would take hours.
    assert time.perf_counter() - started < 60


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("SELECT 1", "SELECT 1"),
        ("```sql\nSELECT 1\n```", "SELECT 1\n"),
        ("Here it is:\n```\nSELECT 1\n```\nIt counts.", "SELECT 1\n"),
        ("```sql\nSELECT 1", "SELECT 1"),
        ("```\na\n```\nor\n```\nb\n```", "a\n"),
        ("`SELECT 1`", "`SELECT 1`"),
        ("a ```b``` c", "a ```b``` c"),
    ],
)
def test_strip_code_fence(text: str, content: str) -> None:
    assert strip_code_fence(text) == content
