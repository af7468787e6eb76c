"""Fixtures of all tests."""

import signal
from pathlib import Path

import pytest
from support import ROOT, SHARED_DATA

# A shell that starts tests in the background has them ignore Ctrl-C, and what they start, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shared_data() -> Path:
    """Give the folder of real data beside the project, or skip."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data is not here: {SHARED_DATA.relative_to(ROOT.parent)} is absent")
    return SHARED_DATA


# Workers take whole files, in this order. The long ones begin first, so that no worker is left
# alone with one at the end; then come the others that run Snakemake, then those of a moment.
LONGEST = (
    "test_interruptions.py", "test_processes.py", "test_fault_points.py", "test_reruns.py",
    "test_token_reruns.py", "test_resume.py", "test_real_data.py", "test_bad_input.py",
    "test_cluster_generic.py", "test_real_records.py", "test_trace_memory.py", "test_readme.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front."""

    def rank(item: pytest.Item) -> tuple[int, bool]:
        name, room = item.path.name, item.path.parent.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), room != "workflow"

    items.sort(key=rank)
