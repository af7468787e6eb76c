"""The benchmark's corpus: made by the seed alone, every document different, new words all along."""

import json
import sys
from pathlib import Path

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import corpus

PAIRS = [
    (f"Which {word} costs {number} dollars in {place}?", f"The {word} of {place} costs {number}.")
    for number, (word, place) in enumerate(
        [("carrot", "Athens"), ("lantern", "Bergen"), ("bicycle", "Cordoba"), ("teapot", "Dover")],
        start=17,
    )
]


@pytest.fixture(scope="module")
def records() -> list[dict[str, str]]:
    lines = corpus.Grower(PAIRS, seed=0).block(0)
    return [json.loads(line) for line in lines]


def test_the_seed_alone_decides() -> None:
    first, again = (corpus.Grower(PAIRS, seed=3).block(5) for _ in range(2))
    assert first == again
    assert corpus.Grower(PAIRS, seed=4).block(5) != first


def test_no_document_comes_twice(records: list[dict[str, str]]) -> None:
    assert len({(r["prompt"], r["completion"]) for r in records}) == len(records) > 1000


def test_a_corpus_is_as_long_as_asked_and_starts_with_real_records(
    tmp_path: Path, shared_data: Path
) -> None:
    path = tmp_path / "corpus.jsonl"
    made = corpus.make_corpus(path, n_bytes=200_000, data=shared_data, processes=1)
    lines = path.read_bytes().splitlines(keepends=True)
    assert made["n_bytes"] == path.stat().st_size >= 200_000 > path.stat().st_size - len(lines[-1])
    assert made["n_records"] == len(lines)
    real = corpus.real_pairs(shared_data)
    starts = {prompt for prompt, _ in real}
    assert all(json.loads(line)["prompt"] in starts for line in lines)
