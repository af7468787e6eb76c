"""The Snakemake that submits retries a job elsewhere; the one inside of that job does not."""

from pathlib import Path

import pytest
from workflow_space import make_workspace

pytestmark = pytest.mark.chain


@pytest.mark.parametrize(("mode", "n_retries"), [("default", 1), ("remote", 0)])
def test_only_the_submitting_snakemake_retries(tmp_path: Path, mode: str, n_retries: int) -> None:
    space = make_workspace(tmp_path)
    bundle = space.root / "results" / "tiny" / "bundle.tar"
    bundle.parent.mkdir(parents=True)
    bundle.write_text("no tar")
    snakefile = ("-s", "workflow/remote.smk", "--mode", mode)
    done = space.snakemake(*snakefile, "--config", "retries=1", "--", "results/tiny/outcome.tar")
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "Error in rule train_bundle" in said
    assert said.count("Trying to restart job") == n_retries
