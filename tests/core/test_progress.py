import pytest

from expertflow.core.progress import ProgressPrinter


def test_a_long_job_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressPrinter("e/000", total=2000, unit="documents tokenized", every_s=0)
    progress.add(500)
    assert capsys.readouterr().out.startswith("e/000: 500 of 2,000 documents tokenized (25%), ")
    progress.add(1500)
    assert "2,000 of 2,000 documents tokenized (100%), about 0 s left" in capsys.readouterr().out


def test_a_short_job_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressPrinter("e/000", total=10, unit="documents tokenized")
    progress.add(10)
    assert capsys.readouterr().out == ""
    assert (progress.n_done, progress.elapsed_s > 0) == (10, True)
