"""The migration page names only settings, paths, commands and flags that exist."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT, SCRIPTS

from expertflow.config.validate import FORMER_NAMES

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
SCHEMAS = ROOT / "workflow" / "schemas"
# What stands in the second column where no setting took a thing's place.
WITHOUT_NAME = ("gone", "always")
MANIFEST_KEYS = r"(?:training|data|evaluation|decoding|export|sources)\.[\w.]+|model"
SET_UPS = re.findall(r"^## (Set-up \w)", PAGE, re.MULTILINE)


def section(title: str) -> str:
    start = PAGE.index(f"\n## {title}")
    return PAGE[start : (PAGE + "\n## ").index("\n## ", start + 1)]


def rows(text: str) -> list[list[str]]:
    """Give the cells of all tables, heads and rulers left out."""
    lines = text.splitlines()
    found = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("|") and not line.startswith("|---") and following[:4] != "|---":
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def schema(name: str) -> Any:
    found = yaml.safe_load((SCHEMAS / f"{name}.schema.yaml").read_text(encoding="utf-8"))
    if name == "expert":
        found["$defs"]["training"] = schema("training")
    return found


def has(root: Any, path: str) -> bool:
    """Tell whether a schema has a dotted path; a list's keys are those of its items."""
    node = root
    for part in path.split("."):
        node = resolved(root, node)
        node = resolved(root, node["items"]) if "items" in node else node
        if part not in node.get("properties", {}):
            return False
        node = node["properties"][part]
    return True


def resolved(root: Any, node: Any) -> Any:
    while "$ref" in node:
        node = root["$defs"][node["$ref"].removeprefix("#/$defs/")]
    return node


def commands() -> Iterator[list[str]]:
    """Give the words of each command of a script, from code blocks and from tables."""
    joined = PAGE.replace("\\\n", " ")
    for text in re.findall(r"^(?:\| [^|]*\| `)?(python workflow/[^`\n]+)", joined, re.MULTILINE):
        yield shlex.split(text)


@cache
def flags(script: str) -> frozenset[str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    return frozenset(re.findall(r"--[\w-]+", done.stdout))


def test_all_five_set_ups_have_a_section_and_a_manifest() -> None:
    assert [title[-1] for title in SET_UPS] == list("ABCDE")
    named = {name for row in rows(PAGE[: PAGE.index("\n## ")]) for name in codes(row[1])}
    shipped = {path.stem for path in (ROOT / "config" / "experts").glob("*.yaml")}
    assert named == shipped


@pytest.mark.parametrize("title", [*SET_UPS, "Trainer and TRL", "What no set-up had"])
def test_every_key_of_a_manifest_exists(title: str) -> None:
    named = {code for row in rows(section(title)) for cell in row[1:] for code in codes(cell)}
    keys = {code for code in named if re.fullmatch(MANIFEST_KEYS, code)}
    assert keys
    assert not [key for key in sorted(keys) if not has(schema("expert"), key)]


def test_every_field_of_set_up_a_is_a_setting_or_named_as_gone() -> None:
    fields = 0
    for row in rows(section("Set-up A").split("| old script |")[0]):
        was, became = row[:2]
        fields += len(codes(was))
        assert codes(became) or became in WITHOUT_NAME, was
        for name in codes(was):
            assert f"training.{name}" in codes(became) or became in WITHOUT_NAME, name
    assert fields == 14


@pytest.mark.parametrize("title", [*SET_UPS, "Trainer and TRL"])
def test_every_old_thing_has_a_place_or_is_gone(title: str) -> None:
    table = rows(section(title))
    assert table
    nowhere = [row[0] for row in table if not re.search(r"`|gone|always|none:|part of", row[1])]
    assert not nowhere


def test_hints_for_unknown_keys_agree_with_the_page() -> None:
    pairs = [(name, codes(row[1])) for row in rows(section("Trainer")) for name in codes(row[0])]
    hinted = [(name, new) for name, new in pairs if name in FORMER_NAMES]
    assert len(hinted) >= 8
    for name, new in hinted:
        assert any(key.endswith(f".{FORMER_NAMES[name]}") for key in new), name


def test_every_path_of_set_up_b_is_in_the_report() -> None:
    table = [row for row in rows(section("Set-up B")) if row[0].startswith("`.training_")]
    assert len(table) == 5
    for was, became, _ in table:
        assert codes(was) == [f".{path}" for path in codes(became)], was
    named = [code for row in table for cell in row for code in codes(cell)]
    paths = {code.lstrip(".") for code in named}
    assert len(paths) == 6
    assert not [path for path in sorted(paths) if not has(schema("report"), path)]


def test_every_command_has_its_script_and_flags() -> None:
    found = list(commands())
    assert len(found) >= 10
    for words in found:
        script = Path(words[1])
        assert (ROOT / script).is_file(), script
        given = {word for word in words if word.startswith("--")}
        assert given <= flags(script.name), script


def test_every_flag_that_replaces_one_of_set_up_c_is_the_trainers() -> None:
    table = [row for row in rows(section("Set-up C")) if row[0].startswith("`--")]
    new = [code for row in table for code in codes(row[1]) if re.fullmatch(r"--[\w-]+[a-z]", code)]
    assert len(new) > 20
    assert set(new) <= flags("train_expert.py")


def test_settings_of_the_configuration_exist() -> None:
    cells = [row[1] for row in rows(PAGE) if "`config/config.yaml`" in row[1]]
    named = [codes(cell)[0] for cell in cells]
    assert named == ["scratch", "compare"]
    assert not [name for name in named if not has(schema("config"), name)]


def test_every_link_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        name, _, anchor = link.partition("#")
        page = (ROOT / "docs" / name).resolve() if name else ROOT / "docs" / "migration.md"
        assert page.is_file(), link
        heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        assert not anchor or anchor in slugs, link
