"""Fixtures of all tests."""

from pathlib import Path

import pytest
from support import ROOT, SHARED_DATA


@pytest.fixture
def shared_data() -> Path:
    """Give the folder of real data beside the project, or skip."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data is not here: {SHARED_DATA.relative_to(ROOT.parent)} is absent")
    return SHARED_DATA
