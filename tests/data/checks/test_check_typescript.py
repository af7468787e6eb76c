import json
from pathlib import Path

import pytest

from expertflow.data.checks.registry import build_checks
from expertflow.data.reject import Filtered
from expertflow.data.settings import FieldCheck

RUN = build_checks((FieldCheck(field="code", check="typescript"),), source="s")


@pytest.mark.parametrize(
    "text",
    [
        "const a: number = 1",
        "interface A<T> { b?: T }",
        "// only a comment",
        "let b = <number>a;",
        "const f = " + "(" * 5_000 + "1" + ")" * 5_000,
    ],
    ids=lambda text: text[:20],
)
def test_code_passes(text: str) -> None:
    record = {"code": text}
    assert RUN(record) is record


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("", "no code"),
        (" \n", "no code"),
        ("const a = ;", "line 1, column"),
        ("let a = 1;\nlet é = [f(2];", "line 2, column 13: '\\)' is missing"),
        ("def f(x):\n    return x", "line 1, column"),
        ("const \ud800 = 1", "line 1, column"),
        ("a" * 200_001, "longer than 200,000"),
        ("function f() { return 1", "line 1, column"),
    ],
    ids=["empty", "blank", "hole", "missing", "python", "surrogate", "long", "unclosed"],
)
def test_what_is_no_typescript(text: str, detail: str) -> None:
    with pytest.raises(Filtered, match=detail) as caught:
        RUN({"code": text})
    assert (caught.value.reason, caught.value.field) == ("typescript_unparsable", "code")


def test_real_solutions(shared_data: Path) -> None:
    """Solutions that are whole parse. Some marked as verified are cut off, which shows here."""
    lines = (shared_data / "expert-typescript" / "mbtsp.jsonl").read_bytes().splitlines()
    n_whole = 0
    for line in lines:
        row = json.loads(line)
        code = row["prompt"] + (row["canonical_solution"] or "")
        if row["verified"] and code.count("{") == code.count("}"):
            n_whole += 1
            if row["task_id"] not in {"MBTSP/161", "MBTSP/672", "MBTSP/744"}:  # really broken
                RUN({"code": code})
    assert n_whole > 250
