"""Every rule that asks for a card gets the queue and the memory of one, whatever the scheduler."""

import re
from typing import Any

import pytest
import yte
from support import ROOT

RULES = ROOT / "workflow" / "rules"
HEAD = re.compile(r"^rule (\w+):\n((?:(?:    .*)?\n)+)", re.MULTILINE)
RESOURCES = re.compile(r"^    resources:\n((?:        .*\n)+)", re.MULTILINE)


def rules_with_cards() -> set[str]:
    found = set()
    for path in RULES.glob("*.smk"):
        for name, body in HEAD.findall(path.read_text()):
            asked = RESOURCES.search(body)
            if asked and re.search(r"^ +gpu=", asked[1], re.MULTILINE):
                found.add(name)
    return found


def resources(profile: str) -> dict[str, dict[str, Any]]:
    text = (ROOT / "profiles" / profile / "config.yaml").read_text()
    made: dict[str, dict[str, Any]] = yte.process_yaml(text, require_use_yte=True)["set-resources"]
    return made


def test_the_rules_are_found() -> None:
    assert rules_with_cards() >= {"train_expert", "evaluate_expert", "ablate_variant"}


@pytest.mark.parametrize(
    ("profile", "queue"), [("slurm", "slurm_partition"), ("cluster-generic", "queue")]
)
def test_all_of_them_get_what_training_gets(profile: str, queue: str) -> None:
    asked = resources(profile)
    train = asked["train_expert"]
    for rule in sorted(rules_with_cards()):
        assert rule in asked, f"profiles/{profile}: set-resources leaves out {rule}"
        assert asked[rule][queue] == train[queue], rule
        assert asked[rule]["mem_mb"] == train["mem_mb"] == 64000, rule
