"""Hints about mistakes on the command line."""

import sys
from pathlib import Path

import pytest

from snakemake_logger_plugin_expertflow.hints import explain_missing_snakefile


def test_no_snakefile_hint_if_one_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Snakefile").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    told = ("-s a", "-sa", "--snakefile a", "--snakefile=a", "--snake a", "-h", "--vers", "-n -sa")
    for words in told:
        assert explain_missing_snakefile(words.split()) is None
    for words in ("-n", "all --cores 1", "--verbose", "--config s=1", "show"):
        assert explain_missing_snakefile(words.split()) is not None
