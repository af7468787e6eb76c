"""Which variants run again for which edit; a requested ablation lists one job per variant."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from workflow_space import Workspace

pytestmark = [pytest.mark.chain, pytest.mark.long]

RECORD = "results/tiny/ablation.json"
# On a CPU this equals the plan, which is known without a run.
TWO = {
    "ladder": {
        "start": {"name": "naive", "label": "Naive", "training": {"bf16": False}},
        "steps": [{"name": "end", "label": "The plan", "as_planned": ["bf16"]}],
    },
    "claims": [{"claim": "c", "by": "A", "said": "2x", "of": "plan", "to": "naive", "low": 2.0}],
}
LOOSE = {"name": "loose", "label": "Loose", "training": {"attention": "sdpa"}}
ONE = {"variants": [LOOSE]}


@pytest.fixture(scope="module")
def ablated(finished: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    space = finished.copy(tmp_path_factory.mktemp("ablated") / "a space")
    write(space, "mine", TWO)
    write(space, "more", ONE)
    configure(space)
    space.run(RECORD)
    return space


@pytest.fixture
def space(ablated: Workspace, tmp_path: Path) -> Workspace:
    return ablated.copy(tmp_path / "space")


def write(space: Workspace, name: str, value: dict[str, Any]) -> None:
    (space.root / "config" / "ablations" / f"{name}.yaml").write_text(yaml.safe_dump(value))


def configure(space: Workspace, **ablation: Any) -> None:
    settings = {"n_warmup_steps": 1, "n_timed_steps": 3, "max_seconds": 5}
    settings |= {"files": ["mine", "more"], **ablation}
    config = {"experts": {"tiny": {}, "other": {}}, "ablation": settings}
    (space.root / "config" / "config.yaml").write_text(yaml.safe_dump(config))


def jobs(space: Workspace, *arguments: str) -> set[str]:
    out = space.run("-n", *(arguments or [RECORD]))
    variants = set(re.findall(r"^would run  ablate_variant +tiny +(\S+)", out, re.MULTILINE))
    return variants | (
        set(re.findall(r"^would run  (\w+)", out, re.MULTILINE)) - {"ablate_variant"}
    )


def test_each_edit_reruns_what_it_should(space: Workspace) -> None:
    assert jobs(space) == set()
    # A variant's name is only on the page.
    write(space, "more", {"variants": [{**LOOSE, "label": "Another word"}]})
    assert jobs(space) == {"ablate_expert"}
    write(space, "more", {"variants": [{**LOOSE, "training": {"attention": "eager"}}]})
    assert jobs(space) == {"loose", "ablate_expert"}
    write(space, "more", ONE)
    write(space, "mine", {**TWO, "claims": []})
    assert jobs(space) == {"ablate_expert"}
    write(space, "mine", TWO)
    configure(space, n_timed_steps=4)
    assert jobs(space) == {"naive", "end", "loose", "ablate_expert"}
    configure(space, files=["more"])
    assert jobs(space) == {"ablate_expert"}


def test_one_variant_can_be_requested(space: Workspace) -> None:
    (space.root / "results/tiny/ablation/loose.json").unlink()
    assert jobs(space, "results/tiny/ablation/loose.json") == {"loose"}
    assert "did you mean 'loose'" in space.refused("-n", "results/tiny/ablation/lose.json")


def test_only_variants_that_tokenize_read_texts(space: Workspace) -> None:
    staged = {"name": "staged", "label": "Staged", "metric": "read_speed"}
    write(space, "more", {"variants": [{**LOOSE, "rows": "on_the_fly"}, staged]})
    output = space.run("-n", "--logger-expertflow-snakemake", RECORD)
    inputs = re.findall(r"input: (.*)\n    output: results/tiny/ablation/(\w+).json", output)
    by_name = {name: read for read, name in inputs}
    assert set(by_name) == {"loose", "staged"}
    assert "keep.arrow" in by_name["loose"] and "documents/sums" in by_name["loose"]
    assert "staging.json" in by_name["staged"] and "keep.arrow" not in by_name["staged"]


def test_the_record_contains_the_ladder_and_the_claim(space: Workspace) -> None:
    record = space.record("ablation.json")
    bars = {bar["name"]: bar for bar in record["bars"]}
    assert record["ladders"] == [["naive", "end"]] and list(bars) == ["naive", "end", "loose"]
    # On a CPU both rungs equal the plan, so there is no step between them.
    assert bars["end"]["outcome"] == "is the plan" and bars["end"]["step"] is None
    assert bars["loose"]["outcome"] == "measured" and bars["loose"]["ratio"] is not None
    assert record["claims"][0]["verdict"] == "not measurable"
    left = (space.root / "results" / "tiny").glob(".ablation*")
    assert [path.name for path in left] == [".ablation.json.fingerprint"]
    assert (space.root / "results" / "tiny" / "ablation.html").stat().st_size > 1000
