"""Lets these tests make the workspaces of tests/workflow."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
