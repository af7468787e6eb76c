"""Fixtures of all tests."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from progress import Progress
from support import ROOT, SHARED_DATA

# A shell that starts tests in the background has them ignore Ctrl-C, and what they start, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup they would ignore a hangup; with a handler of their own only what they start hears it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Tests make repositories of their own; a hook of git names the one that it runs for.
for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
    os.environ.pop(name, None)
# A profile of the user's own would be Snakemake's, too.
os.environ.pop("SNAKEMAKE_PROFILE", None)
# Colors would stand in the texts that are compared.
os.environ.pop("FORCE_COLOR", None)
# What listens on loopback is asked directly, whatever proxy leads out of this machine.
for name in ("no_proxy", "NO_PROXY"):
    hosts = os.environ.get(name, "")
    if hosts != "*":
        os.environ[name] = ",".join(filter(None, [hosts, "127.0.0.1", "localhost"]))

# A slow example is no fault of the code, and every run tries the same ones.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


# A package of each extra. What Node needs is more than a package; its tests look themselves.
EXTRAS = {
    "bitsandbytes": "bitsandbytes", "graph": "graphqlite", "lm-eval": "lm_eval", "s3": "moto",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", metavar="LAST_WORDS", help="show lines, not dots")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    last_words = config.getoption("progress")
    if last_words is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config, last_words))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data beside the project, or skip."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data is not here: {SHARED_DATA.relative_to(ROOT.parent)} is absent")
    return SHARED_DATA


# Workers take whole files, in this order. The long ones begin first, so that no worker is left
# alone with one at the end; then come the others that run Snakemake, then those of a moment.
LONGEST = (
    "test_interruptions.py", "test_processes.py", "test_fault_points.py", "test_reruns.py",
    "test_token_reruns.py", "test_resume.py", "test_whole_runs.py", "test_bad_input.py",
    "test_cluster_generic.py", "test_real_records.py", "test_memory_trace.py", "test_commands.py",
)  # fmt: skip


# What takes minutes belongs to make test-all: interruptions, several processes, bundles, trials,
# clusters, peers, real data.
LONG = {
    "bench": {"test_peers_training", "test_train_gpu"},
    "data": {"test_real_records"},
    "export": {"test_export", "test_merge"},
    "rental": {"test_guard_faults", "test_guard_money", "test_guard_stop"},
    "report": {"test_browser"},
    "studies": {"test_ablation_run", "test_calibrate", "test_trials", "test_tuning_runs"},
    "train": {"test_families", "test_fault_points", "test_processes", "test_memory_trace"},
    "workflow": {
        "test_ablation_reruns", "test_bundles", "test_cluster_generic", "test_extending",
        "test_guarded_training", "test_interruptions", "test_object_storage", "test_own_task",
        "test_rows_alone", "test_tuning", "test_whole_runs",
    },
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes minutes, skip what cannot run here, and move the longest files ahead."""
    for item in items:
        if item.path.stem in LONG.get(item.path.parent.name, ()):
            item.add_marker("long")

        for mark in item.iter_markers("extra"):
            package = EXTRAS.get(mark.args[0])
            if package is not None and find_spec(package) is None:
                item.add_marker(
                    pytest.mark.skip(f"{package} is not installed: make {mark.args[0]}")
                )

    def rank(item: pytest.Item) -> tuple[int, bool]:
        name, room = item.path.name, item.path.parent.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), room != "workflow"

    items.sort(key=rank)
