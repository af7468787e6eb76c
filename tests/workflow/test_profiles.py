"""Snakemake understands every profile, and each has the default's settings for all runs."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
import yte
from snakemake.cli import parse_args
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry
from snakemake_interface_storage_plugins.registry import StoragePluginRegistry
from support import ROOT

PROFILES = sorted(path.parent for path in ROOT.glob("profiles/*/config.yaml"))
NAMES = [path.name for path in PROFILES]
SLURM = ROOT / "profiles" / "slurm"
HEAD = re.compile(r"^rule (\w+):\n((?:(?:    .*)?\n)+)", re.MULTILINE)
RESOURCES = re.compile(r"^    resources:\n((?:        .*\n)+)", re.MULTILINE)
CARDS = re.compile(r"^ +(gpu=|\*\*wf.processes)", re.MULTILINE)
NOT_RUN = ("kubernetes", "googlebatch", "aws-batch")
pytestmark = [pytest.mark.extra("slurm"), pytest.mark.extra("s3")]

# Options of plugins that the project does not install, from the source of this version.
OPTIONS = {
    "kubernetes": "namespace cpu-scalar",  # snakemake-executor-plugin-kubernetes 0.5.1
    "googlebatch": "project region container machine-type image-family image-project cpu-milli"
    " boot-disk-gb boot-disk-type memory max-run-duration retry-count",  # …-googlebatch 0.5.1
    "aws-batch": "region job-queue job-role task-timeout",  # …-aws-batch 0.2.1
    "storage-gcs": "project",  # snakemake-storage-plugin-gcs 1.1.4
}


def read(folder: Path) -> dict[str, Any]:
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    value: dict[str, Any] = yte.process_yaml(text)
    return value


def installed(prefix: str) -> bool:
    storage = prefix.removeprefix("storage-")
    registry = ExecutorPluginRegistry() if storage == prefix else StoragePluginRegistry()
    return storage in registry.plugins


@pytest.mark.parametrize("folder", PROFILES, ids=NAMES)
def test_snakemake_understands_every_key(folder: Path, tmp_path: Path) -> None:
    value = read(folder)
    absent = [prefix for prefix in OPTIONS if not installed(prefix)]
    for prefix in absent:
        named = {key.removeprefix(f"{prefix}-") for key in value if key.startswith(f"{prefix}-")}
        assert named <= set(OPTIONS[prefix].split())
        value = {k: v for k, v in value.items() if not k.startswith(f"{prefix}-")}
    executor = value.get("executor")
    assert executor in {None, *OPTIONS, *ExecutorPluginRegistry().plugins}
    if executor in absent:
        del value["executor"]
    rest = tmp_path / "rest.yaml"
    rest.write_text(yaml.safe_dump(value), encoding="utf-8")
    words = ["-s", str(ROOT / "Snakefile"), "--workflow-profile", str(rest)]
    arguments = parse_args(words)[1]
    assert arguments.resources["gpu"].value >= 1
    if executor and executor not in absent:
        plugin = ExecutorPluginRegistry().get_plugin(executor)
        assert plugin.get_settings(arguments) is not None


@pytest.mark.parametrize("folder", PROFILES, ids=NAMES)
def test_a_profile_has_the_settings_for_every_run_and_existing_rules(folder: Path) -> None:
    default, value = read(ROOT / "profiles" / "default"), read(folder)
    own = {"resources", "cores"} | ({"nolock"} if folder.name in NOT_RUN else set())
    common = default.keys() - own  # a run of workflow/remote.smk does not use the Snakefile's lock
    assert {key: value.get(key) for key in common} == {key: default[key] for key in common}
    assert any(str(limit).startswith("gpu=") for limit in value["resources"])
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("workflow/**/*.smk")]
    rules = {name for text in texts for name in re.findall(r"^rule (\w+):", text, re.MULTILINE)}
    named = {*value.get("set-resources", {}), *value.get("set-threads", {})}
    named |= {str(group).partition("=")[0] for group in value.get("groups", ())}
    assert named <= rules


@pytest.mark.parametrize("name", NOT_RUN)
def test_a_profile_that_was_not_run_says_so(name: str) -> None:
    text = (ROOT / "profiles" / name / "config.yaml").read_text(encoding="utf-8")
    assert re.search(r"^# NOT run ", text, re.MULTILINE)
    assert f"--workflow-profile profiles/{name}" in text
    for key, value in read(ROOT / "profiles" / name).items():
        secret = re.search(r"password|secret|token|access-key", key)
        assert not secret, f"{key}: {value} belongs into the environment"


def test_profiles_are_selected_by_the_option_that_replaces_the_default() -> None:
    # With --profile, profiles/default would override the named one, key by key: always gpu=1.
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/examples/**/*.y*ml")]
    for page in [*pages, *ROOT.glob("profiles/*/config.yaml")]:
        assert not re.search(r" --profile\b", page.read_text(encoding="utf-8")), page.name


def test_all_rules_with_cards_get_the_resources_of_training() -> None:
    texts = [path.read_text() for path in ROOT.glob("workflow/rules/*.smk")]
    bodies = {name: body for text in texts for name, body in HEAD.findall(text)}
    asking = [(name, asked) for name, body in bodies.items() if (asked := RESOURCES.search(body))]
    with_cards = [name for name, asked in asking if CARDS.search(asked[1])]
    assert "train_expert" in with_cards
    for profile, queue in (("slurm", "slurm_partition"), ("cluster-generic", "queue")):
        asked = read(ROOT / "profiles" / profile)["set-resources"]
        for rule in with_cards:
            assert rule in asked, f"profiles/{profile}: set-resources leaves out {rule}"
            assert asked[rule][queue] == asked["train_expert"][queue], rule
            assert asked[rule]["mem_mb"] == 64000, rule


@pytest.mark.parametrize(
    ("script", "command"), [("exit 0", "sacct"), ("exit 1", "squeue"), (None, "squeue")]
)
def test_sacct_is_used_only_if_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, command: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else "/nowhere")
    if script:
        (tmp_path / "sacct").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "sacct").chmod(0o755)
    assert read(SLURM)["slurm-status-command"] == command


def test_names_of_the_cluster_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"CPU": "batch", "GPU": "h100", "GPU_MODEL": "nvidia_h100", "ACCOUNT": "lab",
           "GPUS": "8", "GPU_MINUTES": "2880", "GPU_MEM_MB": "128000"}  # fmt: skip
    for name in own:
        monkeypatch.delenv(f"EXPERTFLOW_SLURM_{name}", raising=False)
    plain = read(SLURM)
    for name, value in own.items():
        monkeypatch.setenv(f"EXPERTFLOW_SLURM_{name}", value)
    named = read(SLURM)
    train = plain["set-resources"]["train_expert"]
    assert plain["default-resources"]["slurm_partition"] == "cpu"
    assert train["slurm_partition"] == "gpu" and not {"gpu_model", "runtime"} & train.keys()
    assert "slurm_account" not in plain["default-resources"]
    assert named["default-resources"]["slurm_partition"] == "batch"
    assert named["default-resources"]["slurm_account"] == "lab"
    assert named["resources"] == ["gpu=8"]
    assert named["set-resources"]["train_expert"]["runtime"] == 2880
    of_card = {"slurm_partition": "h100", "gpu_model": "nvidia_h100", "mem_mb": 128000}
    # Slurm gives a group one partition.
    grouped = [line.split("=")[0] for line in named["groups"]]
    assert grouped == ["stage_to_nvme", "train_expert", "generate_answers"]
    for rule in ("train_expert", "generate_answers", "ablate_variant", "tune_expert"):
        assert of_card.items() <= named["set-resources"][rule].items()
    assert named["set-resources"]["stage_to_nvme"]["slurm_partition"] == "h100"
    # As its rule requests: nodes without cards may have less memory than those with.
    assert "mem_mb" not in named["set-resources"]["export_model"]


def test_a_missing_plugin_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "executor" in name else find(name)
    )
    with pytest.raises(SystemExit, match="needs snakemake-executor-plugin-slurm; make slurm, or"):
        read(SLURM)
