"""Fixtures of all tests."""

import os
import signal
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from progress import Progress, work_of
from support import ROOT, SHARED_DATA

# A shell that starts tests in the background makes them and their children ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup they would ignore a hangup; with this handler only their children receive it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Tests ignore the user's environment: the repository of a git hook, Snakemake
# profiles, a surrounding Slurm job, their hub and cloud, the make that runs these tests; and
# colors and language, which would appear in compared texts.
THEIRS = (
    "GIT_", "SNAKEMAKE_", "SLURM_", "SBATCH_", "EXPERTFLOW_SLURM_", "HF_", "AWS_", "XDG_", "RSYNC_",
    "MAKE", "MFLAGS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "FORCE_COLOR", "COLUMNS",
    "LANG", "LC_",
)  # fmt: skip
for name in [name for name in os.environ if name.startswith(THEIRS)]:
    del os.environ[name]
os.environ |= {"LC_ALL": "C.UTF-8", "TZ": "UTC", "GIT_CONFIG_NOSYSTEM": "1"}
time.tzset()
os.umask(0o022)
# Nor are the settings in their home. Workers share the one that pytest made before starting them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    HOME = tempfile.TemporaryDirectory(prefix="home-")
    Path(HOME.name, ".gitconfig").write_text("[safe]\n\tdirectory = *\n")
    os.environ["HOME"] = HOME.name

# Servers on loopback are reached directly, whatever this machine's proxy.
for name in ("no_proxy", "NO_PROXY"):
    hosts = os.environ.get(name, "")
    if hosts != "*":
        os.environ[name] = ",".join(filter(None, [hosts, "127.0.0.1", "localhost"]))

# A slow example is not a fault of the code, and every run tries the same ones.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


# One package per extra. Node needs more than a package; its tests check themselves.
EXTRAS = {
    "bitsandbytes": "bitsandbytes", "graph": "graphqlite", "lm-eval": "lm_eval", "s3": "boto3",
    "slurm": "snakemake_executor_plugin_slurm", "triton": "triton",
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
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no real data: {SHARED_DATA.relative_to(ROOT.parent)} is missing")
    return SHARED_DATA


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that cannot run here, and move long ones to the front."""
    for item in items:
        for mark in item.iter_markers("extra"):
            package = EXTRAS.get(mark.args[0])
            if package is not None and find_spec(package) is None:
                item.add_marker(
                    pytest.mark.skip(f"{package} is not installed: make {mark.args[0]}")
                )
    # Workers take whole files, in this order, so that none is left with a long one at the end.
    work = Counter[Path]()
    for item in items:
        work[item.path] += work_of(item.nodeid)
    items.sort(key=lambda item: -work[item.path])
