"""What a disk has no room for is refused before it is written."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from expertflow.core.disk import check_space
from expertflow.core.errors import HardwareError


def test_what_lies_on_one_disk_has_to_fit_there_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    needs = [(tmp_path / "state", 3e6, "4 checkpoints"), (tmp_path / "a" / "b", 2e6, "the model")]
    check_space(needs, fix="free some")
    with pytest.raises(HardwareError) as caught:
        check_space([*needs, (tmp_path, 7, "a bundle")], fix="free some")
    assert str(caught.value).startswith(f"{tmp_path / 'state'}: file system /")
    assert str(caught.value).endswith(
        " has 5.0 MB free, 5.0 MB needed for 4 checkpoints and the model and a bundle; free some"
    )
