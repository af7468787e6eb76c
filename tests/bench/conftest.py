"""Share the warm jobs of tests/workflow with these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
