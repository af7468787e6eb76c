import pytest

from expertflow.core.progress import ProgressPrinter


def test_a_long_job_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressPrinter("e/000", total=2000, unit="documents tokenized", every_s=0)
    progress.add(500)
    assert capsys.readouterr().out.startswith("e/000: 500 of 2,000 documents tokenized (25%), ")
    progress.add(1500)
    assert "2,000 of 2,000 documents tokenized (100%), about 0 s left" in capsys.readouterr().out
