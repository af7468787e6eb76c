"""What the README tells a newcomer to do works as it stands."""

import json
import re

import pytest
from support import ROOT
from workflow_space import Workspace

pytestmark = pytest.mark.chain
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(kind: str, *, containing: str) -> str:
    """Give the fenced block that holds a text, without its indentation."""
    fences = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", README, re.MULTILINE | re.DOTALL)
    indent, text = next((i, t) for i, k, t in fences if k == kind and containing in t)
    return "\n".join(line.removeprefix(indent) for line in text.splitlines()) + "\n"


def test_ones_own_data_in_five_minutes(tmp_path_factory: pytest.TempPathFactory) -> None:
    mine = Workspace(tmp_path_factory.mktemp("mine"))
    record = json.loads(block("", containing="capital of France"))
    for name in ("config/experts", "data"):
        (mine.root / name).mkdir(parents=True)
    lines = [{**record, "question": f"{record['question']} ({i})"} for i in range(40)]
    (mine.root / "data" / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    manifest = block("yaml", containing="Answers questions in one word")
    (mine.root / "config" / "experts" / "mine.yaml").write_text(manifest)
    said = mine.run("-s", str(ROOT / "Snakefile"), "results/mine/report.json")
    report = json.loads((mine.root / "results" / "mine" / "report.json").read_text())
    assert report["run"]["preset"] == "demo"
    assert "report.html" in said


def test_every_path_that_the_readme_names_is_there() -> None:
    tree = block("", containing="the chain, drawn; configuration")
    paths = [line.split()[0] for line in tree.splitlines() if line and not line.startswith(" ")]
    assert len(paths) > 10
    for path in paths:
        assert (ROOT / path).exists(), f"README names {path}"
    for link in re.findall(r"\]\(([^)h][^)]*)\)", README):
        assert (ROOT / link).exists(), f"README links to {link}"


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([\w-]+)", README, re.MULTILINE)):
        rule = rf"^([\w-]+ )*{target}( [\w-]+)*:"
        assert re.search(rule, makefile, re.MULTILINE), f"make {target}"


def test_the_experts_of_the_table_are_those_of_the_configuration() -> None:
    table = README.split("| expert | what it learns", 1)[1].split("\n\n", 1)[0]
    named = set(re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE))
    shipped = {path.stem for path in (ROOT / "config" / "experts").glob("*.yaml")}
    assert named == shipped
