"""Snakemake's own report carries the receipt, and needs no network for it."""

import zipfile
from pathlib import Path

import pytest
from workflow_space import Workspace

pytestmark = pytest.mark.chain


def test_the_page_is_inside(space: Workspace, tmp_path: Path) -> None:
    target = tmp_path / "report.zip"
    # A proxy that is not there: any attempt to fetch something would fail.
    no_network = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    space.run("--report", str(target), "results/tiny/report.json", **no_network)
    page = (space.root / "results" / "tiny" / "report.html").read_bytes()
    with zipfile.ZipFile(target) as archive:
        inside = [name for name in archive.namelist() if archive.read(name) == page]
        index = next(n for n in archive.namelist() if n.endswith("report.html") and n not in inside)
        text = archive.read(index).decode()
    assert len(inside) == 1, "the receipt is not in Snakemake's report"
    assert "The receipt of expert tiny" in text
