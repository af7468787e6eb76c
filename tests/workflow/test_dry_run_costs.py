"""A real ``snakemake -n`` ends with its trainings' forecast, and nothing else new."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from loopback_hub import Hub, Repository, serving_models
from support import QWEN3_CONFIG
from workflow_space import Workspace, make_workspace, manifest

pytestmark = [pytest.mark.chain, pytest.mark.long]
TITLE = "What the trainings should take; other jobs are not included"


@pytest.fixture
def mine(tmp_path: Path) -> Workspace:
    """Return a place outside the code, with a large and a tiny expert and no results."""
    code, mine = make_workspace(tmp_path / "code"), Workspace(tmp_path / "mine")
    for name in ("config", "data"):
        shutil.move(code.root / name, mine.root / name)
    (mine.root / "model").mkdir()
    (mine.root / "model" / "config.json").write_text(json.dumps(QWEN3_CONFIG))
    (mine.root / "data" / "sums.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 200_000)
    large = manifest(batch_size=16, max_steps=None, num_train_epochs=2.0) | {"model": "model"}
    del large["builtin"]
    mine.write_manifest("large", large)
    prices = {"prices": {"H100 SXM": {"usd_per_hour": 2.49, "as_of": "2026-11-01"}}}
    (mine.root / "config" / "hardware" / "prices.yaml").write_text(yaml.safe_dump(prices))
    return mine


def table(space: Workspace, target: str, *arguments: str, **environment: str) -> list[str]:
    done = space.snakemake("-n", f"results/{target}/report.json", *arguments, **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    before, found, after = done.stdout.partition(f"\n{TITLE}\n")
    # The jobs come before it, and the table is last.
    assert "would run  train_expert" in before or "Nothing to be done" in before
    if not found:
        return before.splitlines()[-1:]
    trainings, others, sums = after.partition("Other jobs: ")
    assert others, after
    # All jobs are added up if each is known.
    assert ("Total: " in sums) is ("unknown" not in sums)
    return trainings.splitlines()


def test_a_dry_run_ends_with_hours_and_dollars(mine: Workspace) -> None:
    code = ("-s", str(mine.root.with_name("code") / "Snakefile"))
    header, line = table(mine, "large", *code, "--config", "hardware=H100 SXM")
    assert header.split() == ["expert", "jobs", "hours", "dollars", "on", "basis"]
    name, n_jobs, _, to, hours, _, and_to, dollars, *_ = line.split()
    assert (name, n_jobs, to, and_to) == ("large", "16", "to", "to")
    assert float(dollars) == pytest.approx(2.49 * float(hours), rel=0.1)
    basis = "estimate from bytes; $2.49/h of 2026-11-01; bound by memory bandwidth"
    assert line.endswith(f"  1 x H100 SXM  {basis}")
    _, line = table(mine, "tiny", *code)
    assert " to " in line and line.endswith("  unknown  cpu  estimate from bytes; no price set")
    # The group of profiles/slurm.
    groups = ("--groups", *(f"{rule}=g" for rule in ("train_expert", "generate_answers")))
    assert table(mine, "tiny", *code, *groups)[1] == line
    # Trainings of a group, and a profile without the table.
    groups = ("--groups", "train_expert=g", "--group-components", "g=2")
    lines = table(mine, "tiny", "results/other/report.json", *code, *groups)
    assert [line.split()[0] for line in lines] == ["expert", "other", "tiny"]
    assert lines[1].endswith("no forecast; jobs in groups have none")
    bare = ("--workflow-profile", "none", "--resources", "gpu=1")
    output = mine.run("-n", "results/tiny/report.json", *code, *bare)
    assert TITLE not in output
    assert "note: this dry run ends without hours and dollars; add --logger" in output


def test_a_model_is_forecast_before_it_is_downloaded(mine: Workspace) -> None:
    (mine.root / "model" / "config.json").unlink()
    files = {"config.json": json.dumps(QWEN3_CONFIG).encode(), "model.safetensors": bytes(10_000)}
    hub = Repository({**files, "tokenizer.json": b"{}"})
    large = mine.root / "config" / "experts" / "large.yaml"
    large.write_text(large.read_text().replace("model: model", "model: maker/model"))
    arguments = ("-s", str(mine.root.with_name("code") / "Snakefile"), "--config", "hardware=L4")
    home = {"HF_HOME": str(mine.root / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    _, line = table(mine, "large", *arguments, **home)
    assert line.endswith(
        "  model maker/model is neither a local folder, nor downloaded, nor available from the hub"
    )
    with serving_models(Hub({"maker/model": hub})) as home["HF_ENDPOINT"]:
        _, line = table(mine, "large", *arguments, **home)
    assert " to " in line and "estimate from bytes" in line
    # Only the sizes of the other files are requested.
    assert hub.ranges("config.json") and not hub.ranges("model.safetensors")
