"""The pins are in several files; they must agree with each other and with the README."""

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
import yte
from support import ROOT

LOCK = ROOT / "envs" / "requirements.lock"
LOGGER = ROOT / "workflow" / "logger"
PLUGIN = "snakemake_logger_plugin_expertflow"


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), lines
    return dict(line.split("==") for line in lines)


def test_the_pins_of_all_files_agree() -> None:
    environment = yaml.safe_load((ROOT / "envs" / "expertflow.yaml").read_text())
    listed = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert dict(line.split("==") for line in listed) == pins(LOCK)
    project = tomllib.loads((LOGGER / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["build-system"]["requires"]
    assert len(wanted) == 3
    assert dict(line.split("==") for line in wanted).items() <= pins(LOCK).items()
    extras = [path for path in sorted(LOCK.parent.glob("*.lock")) if path != LOCK]
    assert len(extras) == 10
    pinned = set(pins(LOCK))
    for extra in extras:
        assert not pins(extra).keys() & pinned, extra
        pinned |= pins(extra).keys()


def test_the_lock_pins_no_build_of_torch_so_that_cpu_and_cuda_share_it() -> None:
    assert pins(LOCK)["torch"] == "2.13.0"
    assert not [name for name in pins(LOCK) if name.startswith(("nvidia-cu", "triton"))]


@pytest.mark.parametrize("path", sorted(LOCK.parent.glob("*.lock")), ids=lambda path: path.name)
def test_installed_versions_are_pinned(path: Path) -> None:
    # Without the vendored copies that setuptools adds to the path once imported.
    places = [sysconfig.get_path("purelib")]
    found = {
        name: installed.version.split("+")[0]
        for name in pins(path)
        for installed in distributions(name=name, path=places)
    }
    # An extra is installed by its own target, completely or not at all.
    assert found == pins(path) or (path != LOCK and not found)


def test_the_logger_plugin_is_imported_from_this_checkout() -> None:
    find = f"import importlib.util; print(importlib.util.find_spec({PLUGIN!r}).origin)"
    done = subprocess.run([sys.executable, "-P", "-c", find], capture_output=True, text=True)
    sources = sorted((LOGGER / PLUGIN).glob("*.py"))
    assert len(sources) >= 3
    for source in sources:
        installed = Path(done.stdout.strip()).with_name(source.name)
        assert installed.read_text() == source.read_text(), f"make install: {done.stderr}"
    install = r"pip install .*--no-deps --no-build-isolation .*\./workflow/logger"
    assert re.search(install, (ROOT / "envs" / "Containerfile").read_text())


@pytest.mark.parametrize("has_uv", [True, False])
def test_uv_is_used_if_installed(tmp_path: Path, has_uv: bool) -> None:
    for name in ("make", "python3", *(["uv"] if has_uv else [])):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    command = ["make", "-Bn", "SHELL=/bin/sh", "install"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True)
    installer = (
        "uv pip install -q --python .venv/bin/python" if has_uv else ".venv/bin/pip install -q"
    )
    assert f"{installer} --no-compile -r envs/requirements.lock" in done.stdout.decode()


def test_the_default_profile_needs_no_logger_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "profiles" / "default" / "config.yaml").read_text()
    assert yte.process_yaml(text)["logger"] == ["expertflow"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    without = yte.process_yaml(text)
    assert "logger" not in without
    assert without["resources"] == ["gpu=1"]
