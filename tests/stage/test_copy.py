from pathlib import Path

import pytest

from expertflow.core.errors import HardwareError
from expertflow.core.files import sha256_directory
from expertflow.stage.copy import ensure_staged, plan_staging
from expertflow.stage.records import StageSpec


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "packed"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "rows.arrow").write_bytes(b"x" * 1000)
    return folder


def test_without_scratch_nothing_is_copied_and_the_record_says_why(source: Path) -> None:
    record = plan_staging(expert="e", spec=StageSpec(scratch=None), source=source, key="k")
    assert record.target is None
    assert "no scratch directory" in record.reason


def test_rows_are_copied_once_and_verified(source: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    spec = StageSpec(scratch=str(scratch))
    first = plan_staging(expert="e", spec=spec, source=source, key="k")
    again = plan_staging(expert="e", spec=spec, source=source, key="k")
    assert (first.n_bytes_copied, again.n_bytes_copied) == (1000, 0)
    assert first.target is not None
    assert (Path(first.target) / "train" / "rows.arrow").read_bytes() == b"x" * 1000


def test_a_damaged_copy_is_made_again(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "scratch" / "k"
    sha256 = sha256_directory(source)
    assert ensure_staged(source=source, target=target, sha256=sha256)
    (target / "train" / "rows.arrow").unlink()
    (target / "train" / "rows.arrow").write_bytes(b"damaged")
    assert ensure_staged(source=source, target=target, sha256=sha256)
    assert sha256_directory(target) == sha256


def test_a_scratch_that_is_not_there_is_named(source: Path, tmp_path: Path) -> None:
    spec = StageSpec(scratch=str(tmp_path / "none"))
    with pytest.raises(HardwareError, match="no such directory"):
        plan_staging(expert="e", spec=spec, source=source, key="k")
