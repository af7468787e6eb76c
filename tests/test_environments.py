"""The pins stand in several files; they must agree, and hold what the README promises."""

import re
from pathlib import Path

import yaml
from support import ROOT

LOCK = ROOT / "envs" / "requirements.lock"


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), lines
    return dict(line.split("==") for line in lines)


def test_conda_and_pip_pin_the_same() -> None:
    environment = yaml.safe_load((ROOT / "envs" / "expertflow.yaml").read_text())
    listed = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert dict(line.split("==") for line in listed) == pins(LOCK)


def test_the_lock_names_no_build_of_torch_so_that_cpu_and_cuda_share_it() -> None:
    assert pins(LOCK)["torch"] == "2.13.0"
    assert not [name for name in pins(LOCK) if name.startswith(("nvidia-cu", "triton"))]


def test_development_pins_do_not_contradict_the_lock() -> None:
    assert not set(pins(ROOT / "envs" / "requirements-dev.lock")) & set(pins(LOCK))


def test_what_is_installed_is_what_is_pinned() -> None:
    from importlib.metadata import version

    for name, pinned in pins(LOCK).items():
        assert version(name).split("+")[0] == pinned, name
