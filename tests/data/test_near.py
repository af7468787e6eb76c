"""Near duplicates and overlap with benchmarks, both found by runs of words."""

import hashlib
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_prepare import write

from expertflow.core.errors import DataError, HardwareError
from expertflow.core.files import sha256_file
from expertflow.data import near as near_module
from expertflow.data import shingles
from expertflow.data.leaks import BenchmarkIndex
from expertflow.data.near import NearIndex, Signer
from expertflow.data.settings import BenchmarkSpec, NearSpec
from expertflow.data.shingles import fold_words, run_hashes, word_hashes

SPEC = NearSpec(threshold=0.8, n_words=5, n_permutations=128)
WORDS = NearSpec(threshold=0.8, n_words=1, n_permutations=128)


def signatures(texts: list[str], spec: NearSpec = SPEC) -> NDArray[np.uint32]:
    signer = Signer(spec)
    raw = b"".join(signer.sign(text) for text in texts)
    return np.frombuffer(raw, "<u4").reshape(len(texts), spec.n_permutations)


def similarity(first: str, second: str, spec: NearSpec = SPEC) -> float:
    a, b = signatures([first, second], spec)
    return float((a == b).mean())


def find_leaders(signed: NDArray[np.uint32], folder: Path) -> list[int]:
    with closing(NearIndex(WORDS, n_documents=len(signed), folder=folder)) as index:
        index.add(signed)
        return index.find_leaders().tolist()


def pair(number: int, jaccard: float, n_words: int = 180) -> tuple[str, str]:
    """Return two texts whose word sets have this Jaccard similarity."""
    shared = round(n_words * 2 * jaccard / (1 + jaccard))
    own = n_words - shared
    words = [f"{number}x{i}" for i in range(shared + 2 * own)]
    return " ".join(words[: shared + own]), " ".join(words[:shared] + words[shared + own :])


def test_a_signature_never_changes() -> None:
    # Shards signed by an older version are compared with new ones.
    text = "the quick brown fox jumps over the lazy dog, 数据库 and Straße"
    digest = hashlib.sha256(Signer(SPEC).sign(text)).hexdigest()
    assert digest == "f1c87cf23a5a831b31f92c2ca34a70557f8251f29a451a986265f0126842a6f4"


def test_punctuation_counts_and_spaces_and_case_do_not() -> None:
    assert similarity("Show ALL\r\n the rows of  t", "show all the rows of t") == 1.0
    assert similarity("SELECT a FROM t WHERE b < 4", "SELECT a FROM t WHERE b > 4") < 0.7
    # A text shorter than a run is one run.
    for text in ("", "one", "one two three four"):
        assert similarity(text, text.upper()) == 1.0
        assert similarity(text, text + " more") == 0.0


def test_near_pairs_are_found_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_module, "PAIRS_AT_ONCE", 3)
    near = [text for i in range(300) for text in pair(i, 0.9)]
    far = [text for i in range(300, 600) for text in pair(i, 0.65)]
    found = find_leaders(signatures(near + far, WORDS), tmp_path)
    assert all(leader in (-1, row - 1) for row, leader in enumerate(found))
    assert sum(leader >= 0 for leader in found[:600]) >= 0.98 * 300
    assert sum(leader >= 0 for leader in found[600:]) <= 0.01 * 300


def test_leaders_come_earlier_and_lead_to_a_kept_document(tmp_path: Path) -> None:
    # a text that drifts: each is near its neighbors, the ends have nothing in common
    texts = [" ".join(f"w{i}" for i in range(4 * step, 4 * step + 100)) for step in range(120)]
    signed = signatures(texts, WORDS)
    found = find_leaders(signed, tmp_path)
    for row, leader in enumerate(found):
        assert leader < row
        if leader >= 0:
            assert (signed[row] == signed[leader]).mean() >= 0.8
    kept = [row for row, leader in enumerate(found) if leader < 0]
    assert kept[0] == 0 and 10 <= len(kept) <= 60


def test_a_full_disk_is_reported_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10 << 20, "total": 1 << 40})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(HardwareError, match=r"has 10.5 MB free, 65.6 MB needed for near-"):
        NearIndex(SPEC, n_documents=100_000, folder=tmp_path)


def test_words_are_normalized() -> None:
    for text, punctuation, wanted in (
        ("Two  Words\r\n", True, "two words"),
        ("a+b, c", True, "a+b, c"),
        ("a+b, c", False, "a b c"),
        ("min_cost([[1, 2]])", False, "min_cost 1 2"),
        ("ÄRGER\u00a0— “ja” STRASSE ß", False, "ärger ja strasse ss"),
        ("e\u0301t\u00e9", True, "été"),
        ("数据库", True, "数 据 库"),
        ("हिन्दी", False, "हिन्दी"),
        ("a\x00b", True, "a b"),
    ):
        assert fold_words(text, punctuation=punctuation).decode().split() == wanted.split()


@pytest.mark.parametrize("size", [16, 64, 1000])
def test_a_long_text_is_cut_between_words(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    text = " ".join(f"w{i * i}" for i in range(2000))
    whole = word_hashes(text.encode())
    runs, signed = run_hashes(whole, 5), Signer(SPEC).sign(text)
    shingles._powers.cache_clear()
    monkeypatch.setattr(shingles, "PIECE", size)
    monkeypatch.setattr(near_module, "RUNS_AT_ONCE", 7)
    assert word_hashes(text.encode()).tolist() == whole.tolist()
    assert run_hashes(whole, 5).tolist() == runs.tolist()
    assert Signer(SPEC).sign(text) == signed
    shingles._powers.cache_clear()


QUESTION = "Janet's ducks lay 16 eggs per day; she eats three for breakfast every morning."
FIRST, SECOND = QUESTION[:30], QUESTION[30:]
FIVE = "How many eggs are left?"
FOUR = "What is the sum?"


def index(*texts: str, n_words: int = 8) -> BenchmarkIndex:
    return BenchmarkIndex([("bench", n_words, texts)])


def spec(path: Path, text: str = "{question}", n_words: int = 8) -> BenchmarkSpec:
    return BenchmarkSpec(path=str(path), text=text, n_words=n_words, sha256=sha256_file(path))


OVERLAPS: list[tuple[list[str], int, list[list[str]], list[list[str]]]] = [
    (
        [QUESTION],
        8,
        [
            [f"Think. {QUESTION} Answer: 9"],
            [QUESTION.upper()],
            [QUESTION.replace("'", "’").replace(" ", "\n")],
            [json.dumps({"content": QUESTION.replace(" ", "\n")})],
            ["ducks lay 16 eggs, per day she eats"],  # eight words
            [FIRST, SECOND],
        ],
        [
            [""],
            ["lay 16 eggs per day she eats"],  # seven words
            ["ducks lay 16 eggs per night she eats three for dinner"],
            ["ducks\x00 lay 15 eggs per day she eats three"],
        ],
    ),
    # A run does not span two turns.
    ([QUESTION], 12, [[FIRST + SECOND]], [[FIRST, SECOND]]),
    # A very short text must be a whole turn.
    (
        [FOUR, "yes"],
        8,
        [["Add 1 and 2.", "what is the SUM"], ["Yes!"]],
        [[f"Add 1 and 2. {FOUR}", "yes, three"], []],
    ),
    # Shorter runs can be set.
    (["SELECT a FROM b", "x y"], 3, [["please select a from it"], ["x y"]], [["x y z"]]),
    # Words without spaces between them are counted one by one.
    (["一个农夫有十六只鸭子"], 8, [["问:一个农夫有十六只鸭子吗?"]], [["农夫有十六只鸡"]]),
]


@pytest.mark.parametrize(("texts", "n_words", "found", "others"), OVERLAPS)
def test_what_counts_as_a_run(texts: list[str], n_words: int, found: Any, others: Any) -> None:
    benchmark = index(*texts, n_words=n_words)
    assert [benchmark.find_overlap(turns) for turns in found] == ["bench"] * len(found)
    assert [benchmark.find_overlap(turns) for turns in others] == [None] * len(others)


def test_benchmarks_are_read_with_their_template(tmp_path: Path) -> None:
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
        ([], "test.jsonl: no records; remove it from data.benchmarks"),
    ],
)
def test_a_benchmark_gap_is_rejected(tmp_path: Path, records: list[object], message: str) -> None:
    path = write(tmp_path / "test.jsonl", *records)
    with pytest.raises(DataError, match=message) as caught:
        BenchmarkIndex.read((spec(path),))
    assert "\n" not in str(caught.value)
