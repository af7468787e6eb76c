"""A fault in a settings file is one line with the file, the line, and what would be right."""

from pathlib import Path
from typing import Any

import pytest
from test_load import base, load

from expertflow.config.read_yaml import at_line, read_yaml
from expertflow.core.errors import ConfigError


def refused(tmp_path: Path, text: str, name: str = "e.yaml") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    line = str(caught.value)
    assert line.startswith(str(path)) and "\n" not in line
    return line.removeprefix(str(path))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("e.yaml", "a:\n  b: 1\n  b: 2\n", ":3: key 'b' is there twice; remove one"),
        ("e.yaml", "a: 1\nb: one: two\n", ":2: a ': ' inside a text; put the text in quotes"),
        ("e.yaml", 'a: "open\nb: 3\n', "a quote that is not closed"),
        ("e.yaml", "a: 1\nb: .nan\n", ":2: b is nan; give a finite number, or null"),
        ("e.yaml", "a:\n  - 1\n  - -.inf\n", ":3: 1 is -inf; give a finite number, or null"),
        ("e.json", '{"a": 1, "a": 2}', "key 'a' is there twice; correct it"),
        ("e.json", '{"a": NaN}', ":1: a is nan; give a finite number, or null"),
        ("e.json", '{"a": 1,\n "b" 2}', ":2: Expecting ':' delimiter; correct the syntax"),
    ],
)
def test_a_fault_has_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    assert said in refused(tmp_path, text, name)


def test_aliases_that_grow_are_bounded(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "values with its aliases written out" in refused(tmp_path, "\n".join(lines))
    assert "an alias that holds itself" in refused(tmp_path, "a: &a [*a]\n")


def test_merge_keys_and_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: 3e-6\n", encoding="utf-8")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": 3e-6}


def test_sources_are_changed_by_name(tmp_path: Path) -> None:
    manifest = {**base(), "sources": [{**base()["sources"][0], "name": "mine"}]}

    def changed(sources: dict[str, Any]) -> dict[str, Any]:
        [source] = load(tmp_path, manifest, experts={"e": {"sources": sources}})["sources"]
        return dict(source)

    # As Snakemake's --config gives them: numbers inside an object are texts.
    source = changed({"mine": {"path": "007", "max_documents": "100"}})
    assert (source["path"], source["max_documents"], source["text"]) == ("007", 100, "{body}")
    with pytest.raises(ConfigError, match=r"sources\.min: the expert has no such .* mean 'mine'"):
        changed({"min": {"path": "b"}})
    with pytest.raises(ConfigError, match=r"sources\.mine is 'b'; give keys"):
        changed({"mine": "b"})


def test_a_place_that_is_gone_is_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    assert at_line(path, ["a"]) == str(path)
    path.write_text("a: {b: 1}\n", encoding="utf-8")
    assert at_line(path, ["c"]) == str(path)
    assert at_line(path, ["a", "c"]) == f"{path}:1"
