"""The docs and examples refer only to things that exist, and the examples work."""

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from support import ROOT, run_script

from expertflow.rental.guard.options import parse_options

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
SCHEMAS = ROOT / "workflow" / "schemas"
SHIPPED = {path.stem for path in (ROOT / "config" / "experts").glob("*.yaml")}
BLOCKS = "training|data|evaluation|decoding|export|sources|training_parameters|training_report"
KEY = re.compile(rf"`\.?((?:{BLOCKS})\.[a-z_.]*[a-z])`")
EXAMPLES = {name: ROOT / "docs/examples/rented" / name for name in ("skypilot.yaml", "dstack.yml")}


@cache
def schema(name: str) -> Any:
    found = yaml.safe_load((SCHEMAS / f"{name}.schema.yaml").read_text(encoding="utf-8"))
    if name == "expert":
        found["$defs"]["training"] = schema("training")
    return found


def has(root: Any, path: str) -> bool:
    """Return whether a schema has a dotted path; a list's keys are those of its items."""
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


@pytest.mark.parametrize("page", PAGES, ids=[path.name for path in PAGES])
def test_every_setting_and_figure_on_a_page_exists(page: Path) -> None:
    for key in KEY.findall(page.read_text(encoding="utf-8")):
        known = any(has(schema(name), key) for name in ("expert", "report"))
        assert known or key.endswith(".json"), key


def test_every_replacement_flag_is_the_trainers() -> None:
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    section = page.split("Flags keep their names", 1)[1].partition("\n\n")[0]
    new = re.findall(r"is `(--[a-z0-9-]+)`|`--\w+` `(--[a-z0-9-]+)`", section)
    flags = {first or second for first, second in new}
    assert {"--batch-size", "--num-train-epochs", "--use-tf32"} <= flags
    assert flags <= set(re.findall(r"--[\w-]+", run_script("train_expert", "--help").stdout))


@pytest.mark.parametrize("page", PAGES, ids=[path.name for path in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, link


def test_the_index_lists_every_document() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in ROOT.glob("docs/*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\((\w+\.md)\)", index))


def test_the_tables_experts_are_those_of_the_configuration() -> None:
    table = README.split("| expert | what it learns", 1)[1].split("\n\n", 1)[0]
    named = set(re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE))
    assert named == SHIPPED


@pytest.mark.parametrize("path", EXAMPLES.values(), ids=list(EXAMPLES))
def test_an_example_refers_to_existing_files_and_says_that_it_was_not_run(path: Path) -> None:
    value: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    text = value["run"] if "run" in value else "\n".join(value["commands"])
    lines = text.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if line.strip()]
    scripts = [word for words in commands for word in words if word.endswith(".py")]
    assert len(scripts) == 2 and all((ROOT / script).is_file() for script in scripts)
    assert "example that was NOT run" in path.read_text(encoding="utf-8")
    (words,) = [w for w in commands if "workflow/scripts/guard_run.py" in w]
    known = {"$STORE": "s3://bucket", "$USD_PER_HOUR": "2.49"}
    settings = parse_options([known.get(word, word) for word in words[2:]], None)
    assert settings.command[0] == "snakemake"
    assert settings.max_usd
    # The guard adds state/ and results/ itself.
    assert settings.push == settings.sync_to == "s3://bucket"


def test_secrets_are_referenced_and_never_written() -> None:
    by_sky = yaml.safe_load(EXAMPLES["skypilot.yaml"].read_text(encoding="utf-8"))["secrets"]
    assert by_sky and set(by_sky.values()) == {None}
    by_dstack = yaml.safe_load(EXAMPLES["dstack.yml"].read_text(encoding="utf-8"))["env"]
    keys = [line for line in by_dstack if re.search("KEY|SECRET|TOKEN", line)]
    assert keys and all(re.fullmatch(r"\w+=\$\{\{ secrets\.\w+ \}\}", line) for line in keys)


def settings_shown() -> list[tuple[str, Any]]:
    found = []
    fence = re.compile(r"^( *)```yaml\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    for page in PAGES:
        for indent, block in fence.findall(page.read_text(encoding="utf-8")):
            lines = [line.removeprefix(indent) for line in block.splitlines()]
            # Two lines with the same key are two alternatives.
            keys = [line.partition(":")[0] for line in lines if re.match(r"\w", line)]
            texts = lines if len(keys) != len(set(keys)) else ["\n".join(lines)]
            found += [(page.name, yaml.safe_load(one)) for one in texts]
    return found


@pytest.mark.parametrize(("page", "value"), settings_shown())
def test_the_schema_allows_the_settings_on_a_page(page: str, value: Any) -> None:
    schemas = [schema(name) for name in ("expert", "ablation", "config")]
    whole = next(one for one in schemas if value.keys() <= one["properties"].keys())
    for key, shown in value.items():
        part = {**whole["properties"][key], "$defs": whole.get("$defs", {})}
        for error in Draft202012Validator(part).iter_errors(shown):
            # A page shows some keys of a block, and omits others.
            assert error.validator == "required" and not error.path, f"{page}: {error.message}"


INSTRUCTIONS = ["#", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "LABEL", "RUN", "WORKDIR"]
SHELL = [ROOT / ".ci" / "run", *ROOT.glob("profiles/*/*.sh")]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_a_shell_script_is_valid(path: Path) -> None:
    shell = "bash" if "bash" in path.read_text(encoding="utf-8").partition("\n")[0] else "sh"
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_file_has_valid_instructions_and_copies_existing_files() -> None:
    text = (ROOT / "envs" / "Containerfile").read_text(encoding="utf-8")
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        assert not word or word in INSTRUCTIONS, line
        if word == "COPY":
            assert all((ROOT / name).exists() for name in rest.split()[:-1]), line
        if word == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
