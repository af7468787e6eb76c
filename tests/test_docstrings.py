"""Examples in docstrings hold."""

import doctest
import importlib
from pathlib import Path

import pytest
from support import SCRIPTS

WITH_EXAMPLES = [
    path for path in sorted(SCRIPTS.glob("expertflow/**/*.py")) if ">>> " in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings(path: Path) -> None:
    name = ".".join(path.relative_to(SCRIPTS).with_suffix("").parts)
    assert doctest.testmod(importlib.import_module(name)).failed == 0
