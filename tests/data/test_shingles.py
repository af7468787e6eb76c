import pytest

from expertflow.data import shingles
from expertflow.data.shingles import run_hashes, spelled, word_hashes


def hashes(text: str) -> list[int]:
    return word_hashes(spelled(text, punctuation=False)).tolist()


@pytest.mark.parametrize(
    ("text", "punctuation", "wanted"),
    [
        ("Two  Words\r\n", True, "two words"),
        ("a+b, c", True, "a+b, c"),
        ("a+b, c", False, "a b c"),
        ("min_cost([[1, 2]])", False, "min_cost 1 2"),
        ("ÄRGER\u00a0— “ja”", False, "ärger ja"),
        ("STRASSE Straße", True, "strasse strasse"),
        ("e\u0301t\u00e9", True, "été"),
        ("数据库", True, "数 据 库"),
        ("हिन्दी में।", True, "हिन्दी में।"),
        ("हिन्दी", False, "हिन्दी"),
        ("a\x00b", True, "a b"),
        ("", True, ""),
    ],
)
def test_words_are_folded(text: str, punctuation: bool, wanted: str) -> None:
    assert spelled(text, punctuation=punctuation).decode().split() == wanted.split()


def test_a_lone_surrogate_does_no_harm() -> None:
    assert len(hashes("a \ud800b c")) >= 2


def test_a_hash_never_changes() -> None:
    # Signatures outlive a version of this code.
    assert hashes("hello world") == [13798230397667775112, 8164829659142268845]
    assert run_hashes(word_hashes(b"hello world"), 2).tolist() == [12296808567400548642]


@pytest.mark.parametrize("size", [7, 64, 1000])
def test_a_long_text_is_cut_between_words(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    raw = " ".join(f"w{i * i}" for i in range(2000)).encode()
    whole = word_hashes(raw)
    runs = run_hashes(whole, 5)
    shingles._powers.cache_clear()
    monkeypatch.setattr(shingles, "PIECE", max(size, 16))
    assert word_hashes(raw).tolist() == whole.tolist()
    assert run_hashes(whole, 5).tolist() == runs.tolist()
    shingles._powers.cache_clear()
