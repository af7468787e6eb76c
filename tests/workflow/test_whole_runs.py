"""Complete runs: real data, Snakemake's own report, a job that is itself a Snakemake."""

import re
import zipfile
from pathlib import Path

import pytest
from workflow_space import Workspace, make_workspace

pytestmark = [pytest.mark.chain, pytest.mark.long]


def test_the_page_is_included(space: Workspace, tmp_path: Path) -> None:
    target = tmp_path / "report.zip"
    # A nonexistent proxy: any attempt to fetch something would fail.
    no_network = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    space.run("--report", str(target), "results/tiny/report.json", **no_network)
    page = (space.root / "results" / "tiny" / "report.html").read_bytes()
    with zipfile.ZipFile(target) as archive:
        inside = [name for name in archive.namelist() if archive.read(name) == page]
        index = next(n for n in archive.namelist() if n.endswith("report.html") and n not in inside)
        text = archive.read(index).decode()
    assert len(inside) == 1, "the receipt is not in Snakemake's report"
    assert "The receipt of expert tiny" in text


@pytest.mark.parametrize(("mode", "n_retries"), [("default", 1), ("remote", 0)])
def test_only_the_submitting_snakemake_retries(tmp_path: Path, mode: str, n_retries: int) -> None:
    space = make_workspace(tmp_path)
    bundle = space.root / "results" / "tiny" / "bundle.tar"
    bundle.parent.mkdir(parents=True)
    bundle.write_text("no tar")
    snakefile = ("-s", "workflow/remote.smk", "--mode", mode, "--logger-expertflow-snakemake")
    done = space.snakemake(*snakefile, "--config", "retries=1", "--", "results/tiny/outcome.tar")
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert re.search("(failed|Error in rule)  ?train_bundle", output)
    assert output.count("Trying to restart job") == n_retries
