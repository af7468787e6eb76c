"""YAML and JSON files: what is read, and the line and fix of a fault."""

from pathlib import Path

import pytest

from expertflow.config.read_yaml import read_yaml
from expertflow.core.errors import ConfigError

# Aliases of aliases: a page of text that expands to 9 to the power of 12 values.
BILLION = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("e.yaml", "a:\n  b: 1\n  b: 2\n", ":3: key 'b' appears twice; remove one"),
        ("e.yaml", "a: 1\nb: one: two\n", ":2: a ': ' inside a text; quote the text"),
        ("e.yaml", 'a: "open\nb: 3\n', "a quote that is not closed"),
        ("e.yaml", "a: {b: 1\n", "that is not closed"),
        ("e.yaml", "a:\n\t{}\n", ":2: a tab"),
        ("e.yaml", "a: 1\nb: {{q}}\n", ":2: a '{' or '[' where a key should be; quote the text"),
        ("e.yaml", "a: *none\n", "an alias (*name) without its anchor"),
        ("e.yaml", "a: 1\nb: .nan\n", ":2: b is nan; use a finite number, or null"),
        ("e.yaml", "a:\n  - 1\n  - -.inf\n", ":3: 1 is -inf; use a finite number, or null"),
        ("e.yaml", BILLION, "values with its aliases expanded"),
        ("e.yaml", "a: &a [*a]\n", "an alias that contains itself"),
        ("e.json", '{"a": 1, "a": 2}', "key 'a' appears twice; correct it"),
        ("e.json", '{"a": NaN}', ":1: a is nan; use a finite number, or null"),
        # A byte order mark, as Windows writes it, is no fault.
        ("e.json", '\ufeff{"a": 1,\n "b" 2}', ":2: Expecting ':' delimiter; correct the syntax"),
    ],
)
def test_a_fault_has_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    line = str(caught.value)
    assert line.startswith(str(path)) and message in line and "\n" not in line


def test_merge_keys_and_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: 3e-6\nd: 46:47\n", encoding="utf-8")
    assert read_yaml(path) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": 3e-6,
        "d": "46:47",
    }
