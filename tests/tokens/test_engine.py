"""Both engines give the same ids, or the fast one is not used."""

import random
import sys
import unicodedata
from pathlib import Path

import pytest

from expertflow.tokens import engine as engine_module
from expertflow.tokens.engine import Encoder, Engine, FastEngine, choose_engine
from expertflow.tokens.ragged import Ragged

# Ids of the real Qwen tokenizer, taken from tokenizers 0.23.3.
GOLDEN = {
    "SELECT name FROM users WHERE age > 21;": [
        4858, 829, 4295, 3847, 5288, 4231, 861, 220, 17, 16, 26,
    ],
    "\n\nassistant\nNaïve café — 東京 2026, I'm 👩‍💻": [
        271, 77091, 198, 16193, 37572, 586, 51950, 1959, 60596, 109, 46553, 220, 17, 15, 17, 21,
        11, 358, 2776, 61804, 102, 378, 235, 145851,
    ],
    "e\u0301 \u00a0x  y\t\tz\r\n": [963, 220, 4102, 87, 220, 379, 197, 20832, 319],
    "<|im_end|>1234567890": [
        27, 91, 318, 6213, 91, 29, 16, 17, 18, 19, 20, 21, 22, 23, 24, 15,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen(shared_data: Path) -> Path:
    return shared_data / "tokenizers" / "qwen"


@pytest.fixture(scope="module")
def engines(qwen: Path) -> list[Encoder]:
    return [choose_engine(qwen, wanted=w, sample=["a text"]) for w in ("auto", "tokenizers")]


def test_both_engines_give_the_golden_ids(engines: list[Encoder]) -> None:
    assert [engine.name for engine in engines] == ["fastokens", "tokenizers"]
    for engine in engines:
        assert engine.encode_flat(list(GOLDEN)).tolist() == list(GOLDEN.values())
        assert [engine.decode(ids) for ids in GOLDEN.values()] == [
            unicodedata.normalize("NFC", text) for text in GOLDEN
        ]
        assert len(engine.encode_flat([])) == 0
        assert engine.encode_flat(["", "a", ""]).lengths.tolist() == [0, 1, 0]


def random_texts() -> list[str]:
    rng = random.Random(0)
    points = [c for c in range(1, 0x30000) if not 0xD800 <= c < 0xE000]
    blanks, marks = " \t\n\r\u00a0\u2009\u3000", "\u0301\u0327\u093c\u200d\ufe0f"
    texts = ["".join(map(chr, rng.choices(points, k=rng.randint(1, 12)))) for _ in range(3000)]
    return texts + ["".join(rng.choices(blanks + "a1.'" + marks, k=15)) for _ in range(3000)]


def test_random_unicode_gives_the_same_ids(engines: list[Encoder], shared_data: Path) -> None:
    gpt2 = shared_data / "tokenizers" / "gpt2"
    other = choose_engine(gpt2, wanted="auto", sample=[])
    assert other.name == "fastokens", other.reason
    texts = random_texts()
    for one, reference in (engines, (other, Engine(gpt2))):
        assert one.encode_flat(texts).tolist() == reference.encode_flat(texts).tolist()


class Wrong(FastEngine):
    def encode_flat(self, texts: list[str]) -> Ragged:
        found = super().encode_flat(texts).tolist()
        pairs = zip(texts, found, strict=True)
        return Ragged.from_lists([[7] if text == "odd" else ids for text, ids in pairs])


def test_one_other_id_rules_the_engine_out(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "FastEngine", Wrong)
    engine = choose_engine(qwen, wanted="auto", sample=["fine", "odd"])
    assert (engine.name, engine.reason) == ("tokenizers", "fastokens gives other ids for 'odd'")


def test_a_tokenizer_that_it_cannot_load_is_left_to_tokenizers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    pieces = [("[unk]", 0.0), ("a", -1.0), ("b", -2.0)]
    Tokenizer(models.Unigram(pieces, unk_id=0)).save(str(tmp_path / "tokenizer.json"))
    engine = choose_engine(tmp_path, wanted="auto", sample=["ab"])
    assert engine.name == "tokenizers"
    assert engine.reason.startswith("fastokens cannot load this tokenizer (")
    assert engine.encode_flat(["ab", ""]).tolist() == [[1, 2], []]


def test_a_missing_package_leaves_the_other(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    engine = choose_engine(qwen, wanted="auto", sample=[])
    assert (engine.name, engine.reason) == ("tokenizers", "fastokens is not installed")
