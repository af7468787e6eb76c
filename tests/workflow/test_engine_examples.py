"""The examples for other engines name scripts and options that exist, and hold no secret."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from expertflow.rental.guard.options import settings_from

EXAMPLES = {name: ROOT / "docs/examples/rented" / name for name in ("skypilot.yaml", "dstack.yml")}


def commands(path: Path) -> list[list[str]]:
    """Give the commands that an example runs on the machine, as words."""
    value: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    text = value["run"] if "run" in value else "\n".join(value["commands"])
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("path", EXAMPLES.values(), ids=list(EXAMPLES))
def test_the_guard_understands_what_it_is_told(path: Path) -> None:
    words = next(w for w in commands(path) if "workflow/scripts/guard_run.py" in w)
    settings = settings_from(
        [w.replace("$STORE", "s3://bucket").replace("$USD_PER_HOUR", "2.49") for w in words[2:]],
        None,
    )
    assert settings.command[0] == "snakemake"
    assert settings.max_usd
    # The guard adds state/ and results/ itself.
    assert settings.push == settings.sync_to == "s3://bucket"


@pytest.mark.parametrize("path", EXAMPLES.values(), ids=list(EXAMPLES))
def test_the_scripts_of_an_example_exist_and_it_says_that_it_was_not_run(path: Path) -> None:
    scripts = [word for words in commands(path) for word in words if word.endswith(".py")]
    assert len(scripts) == 2 and all((ROOT / script).is_file() for script in scripts)
    assert "example that was NOT run" in path.read_text(encoding="utf-8")


def test_secrets_are_named_and_never_written() -> None:
    by_sky = yaml.safe_load(EXAMPLES["skypilot.yaml"].read_text(encoding="utf-8"))["secrets"]
    assert by_sky and set(by_sky.values()) == {None}
    by_dstack = yaml.safe_load(EXAMPLES["dstack.yml"].read_text(encoding="utf-8"))["env"]
    keys = [line for line in by_dstack if re.search("KEY|SECRET|TOKEN", line)]
    assert keys and all(re.fullmatch(r"\w+=\$\{\{ secrets\.\w+ \}\}", line) for line in keys)
