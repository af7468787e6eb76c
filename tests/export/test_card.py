"""The model card lists every source with its licence, and points out what is unusual."""

from typing import Any

import pytest

from expertflow.export.card import licence_lines, model_card

FACTS: dict[str, Any] = {
    "expert": "e",
    "description": "Says things.",
    "base_model": "tiny",
    "base_licence": "mit",
    "method": "lora",
    "preset": "full",
    "scores": [],
    "weights_sha256": "abc",
    "export": {
        "merged_into": "base",
        "dtype": "float32",
        "loss_before_merge": 1.25,
        "loss_after_merge": 1.2500001,
        "n_rows_compared": 4,
    },
}


def source(name: str, licence: str | None, *notes: str) -> dict[str, Any]:
    return {
        "name": name, "licence": licence, "revision": None, "n_records": 1234, "notes": list(notes)
    }  # fmt: skip


def test_every_source_has_a_row_and_a_missing_licence_stands_out() -> None:
    sources = [source("a", "mit"), source("b|c", None)]
    card = model_card({**FACTS, "sources": sources})
    assert "| a | mit | 1,234 | - |" in card
    assert "| b\\|c | **not stated** | 1,234 | - |" in card
    assert "- No licence is stated for: b|c." in card


@pytest.mark.parametrize(
    ("licence", "terms"),
    [
        ("cc-by-sa-4.0", ["share-alike"]),
        ("CC-BY-NC-SA-3.0", ["share-alike", "non-commercial"]),
        ("cc-by-nc-nd-4.0", ["non-commercial", "no derivatives"]),
        ("gpl-3.0", ["share-alike"]),
        ("AGPL-3.0-only", ["share-alike"]),
        ("odbl", ["share-alike"]),
        ("other", ["no known terms"]),
        ("mit, cc-by-nc-4.0", ["non-commercial"]),
        ("apache-2.0", []),
        ("bsd-3-clause", []),
        ("cdla-sharing-1.0", []),
    ],
)
def test_terms_are_read_off_a_licences_name(licence: str, terms: list[str]) -> None:
    expected = [f"- Licence named as {term}: s ({licence})." for term in terms]
    assert [line for line in licence_lines([source("s", licence)]) if line] == expected


@pytest.mark.parametrize(
    ("licences", "differ"),
    [(("mit", "apache-2.0"), True), (("MIT", "mit"), False), (("mit", None), True)],
)
def test_different_licences_are_said(licences: tuple[str | None, ...], differ: bool) -> None:
    said = licence_lines([source(str(i), licence) for i, licence in enumerate(licences)])
    assert any("do not share one licence" in line for line in said) == differ


def test_what_a_source_notes_is_repeated() -> None:
    said = licence_lines([source("s", "mit", "the data set card says cc0-1.0")])
    assert said == ["- s: the data set card says cc0-1.0", ""]


@pytest.mark.parametrize(
    ("merged_into", "words"),
    [
        (None, "trained as a whole; float32"),
        ("base", "adapter merged into the base model; float32"),
        ("dequantised base", "as its 4 bits hold it, dequantised; float32"),
    ],
)
def test_a_card_says_what_its_weights_are(merged_into: str | None, words: str) -> None:
    export = {**FACTS["export"], "merged_into": merged_into}
    card = model_card({**FACTS, "sources": [], "export": export})
    assert words in card
    assert "- Held-out loss of the trained model and of these files: 1.25 and 1.25 (4 rows)" in card
