from pathlib import Path

import pytest
from test_prepare import write

from expertflow.core.errors import DataError
from expertflow.core.files import sha256_file
from expertflow.data.leaks import BenchmarkIndex
from expertflow.data.settings import BenchmarkSpec

QUESTION = "Janet's ducks lay 16 eggs per day; she eats three for breakfast every morning."
FIRST, SECOND = QUESTION[:30], QUESTION[30:]
FIVE = "How many eggs are left?"
FOUR = "What is the sum?"


def index(*texts: str, n_words: int = 8) -> BenchmarkIndex:
    return BenchmarkIndex([("bench", n_words, texts)])


def spec(path: Path, text: str = "{question}", n_words: int = 8) -> BenchmarkSpec:
    return BenchmarkSpec(path=str(path), text=text, n_words=n_words, sha256=sha256_file(path))


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        (f"Think. {QUESTION} Answer: 9", True),
        (QUESTION.upper(), True),
        (QUESTION.replace("'", "’").replace(" ", "\n"), True),
        ("ducks lay 16 eggs, per day she eats", True),  # eight words
        ("", False),
        ("lay 16 eggs per day she eats", False),  # seven words
        ("ducks lay 16 eggs per night she eats three for dinner", False),
        ("ducks\x00 lay 15 eggs per day she eats three", False),
    ],
)
def test_a_run_of_words_is_found_and_less_is_not(text: str, is_found: bool) -> None:
    assert index(QUESTION).find_overlap([text]) == ("bench" if is_found else None)


@pytest.mark.parametrize(
    ("texts", "n_words", "turns", "is_found"),
    [
        # A run does not span two turns.
        ([QUESTION], 8, [FIRST, SECOND], True),
        ([QUESTION], 12, [FIRST, SECOND], False),
        ([QUESTION], 12, [FIRST + SECOND], True),
        # A very short text must be a whole turn.
        ([FOUR, "yes"], 8, ["Add 1 and 2.", "what is the SUM"], True),
        ([FOUR, "yes"], 8, ["Yes!"], True),
        ([FOUR, "yes"], 8, [f"Add 1 and 2. {FOUR}", "yes, three"], False),
        ([FOUR, "yes"], 8, [], False),
        # Short runs may be asked for.
        (["SELECT a FROM b", "x y"], 3, ["please select a from it"], True),
        (["SELECT a FROM b", "x y"], 3, ["x y z"], False),
        (["SELECT a FROM b", "x y"], 3, ["x y"], True),
        # Words without blanks between are counted one by one.
        (["一个农夫有十六只鸭子"], 8, ["问:一个农夫有十六只鸭子吗?"], True),
        (["一个农夫有十六只鸭子"], 8, ["农夫有十六只鸡"], False),
    ],
)
def test_what_counts_as_a_run(
    texts: list[str], n_words: int, turns: list[str], is_found: bool
) -> None:
    found = index(*texts, n_words=n_words).find_overlap(turns)
    assert found == ("bench" if is_found else None)


def test_texts_of_all_lengths_are_found_together() -> None:
    texts = [" ".join(f"{n}w{i}" for i in range(n)) for n in range(1, 30)]
    found = index(*texts, n_words=13)
    assert all(found.find_overlap(["first", text, "last"]) == "bench" for text in texts)
    assert all(found.find_overlap([f"a {text} b"]) == "bench" for text in texts[4:])
    cut = [" ".join(text.split()[: min(n, 13) - 1]) for n, text in enumerate(texts, start=1)]
    assert all(found.find_overlap([text, f"a {text} b"]) is None for text in cut)


def test_benchmarks_are_read_by_their_template(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", {"question": QUESTION, "n": 1}, {"question": FIVE})
    other = write(tmp_path / "other.jsonl", {"a": {"b": "one two three"}, "c": "four five six"})
    found = BenchmarkIndex.read((spec(path), spec(other, "{a.b} {c}", 6)))
    assert found.find_overlap([QUESTION]) == str(path)
    assert found.find_overlap(["zero one two three four five six"]) == str(other)
    assert found.find_overlap(["one two three four five six", QUESTION]) == str(path)
    assert BenchmarkIndex.read(()).find_overlap([QUESTION]) is None


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"question": QUESTION}, {"q": "x"}], r"test.jsonl, line 2: .*question.*'{question}'"),
        ([{"question": QUESTION}, [1]], r"test.jsonl, line 2: .*correct the record"),
        ([{"question": ""}], r"line 1: "),
        ([], "test.jsonl: no record; remove it from data.benchmarks"),
    ],
)
def test_a_benchmark_gap_is_refused(tmp_path: Path, records: list[object], message: str) -> None:
    path = write(tmp_path / "test.jsonl", *records)
    with pytest.raises(DataError, match=message) as caught:
        BenchmarkIndex.read((spec(path),))
    assert "\n" not in str(caught.value)
