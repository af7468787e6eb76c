"""docs/migration.md, followed for each replaced system with its owner's files."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT, SHARED_DATA
from workflow_space import Workspace, copy_code

OWNERS = SHARED_DATA.parent / "owners"
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
MANIFESTS = ("expert-json", "expert-neo4j", "expert-sql", "expert-typescript")
# No model is downloaded, and no GPU requested.
TINY = "model: builtin:tiny-qwen3"


@pytest.fixture
def owners() -> Path:
    if not OWNERS.is_dir():
        pytest.skip(f"no files of the owners: {OWNERS.relative_to(ROOT.parent)} is missing")
    return OWNERS


@pytest.fixture(scope="module")
def mover(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a checkout of the code, as for a migrating user."""
    space = Workspace(tmp_path_factory.mktemp("mover"))
    copy_code(ROOT, space.root)
    (space.root / "data").mkdir()
    return space


def write_records(space: Workspace, path: str) -> None:
    """Write records in every format that a manifest here may read."""
    file = space.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        for i in range(25):
            question, answer = f"what is {i} + 1?", str(i + 1)
            turns = [
                {"role": "user", "content": question}, {"role": "assistant", "content": answer},
            ]  # fmt: skip
            record = {"question": question, "answer": answer, "text": question, "messages": turns}
            stream.write(json.dumps(record) + "\n")


def import_settings(space: Workspace, file: Path, name: str) -> dict[str, Any]:
    """Import a file with the page's command, and write its records; return the manifest."""
    output = f"config/experts/{name}.yaml"
    done = space.script("import_settings", file, "--output", output)
    assert done.returncode == 0, done.stderr
    manifest: dict[str, Any] = yaml.safe_load((space.root / output).read_text())
    for source in manifest["sources"]:
        write_records(space, source["path"])
    return manifest


def plan_run(
    space: Workspace, names: list[str], *, more: str = "", **settings: str
) -> Counter[str]:
    """Plan the command that makes the reports; return how often each rule would run."""
    experts = ", ".join(f"{name}: {{{TINY}{more}}}" for name in names)
    config = [f"experts={{{experts}}}", "hardware=cpu", *(f"{k}={v}" for k, v in settings.items())]
    targets = [f"results/{name}/report.json" for name in names]
    return space.jobs(*targets, "--config", *config, HF_HUB_OFFLINE="1")


@pytest.mark.extra("bitsandbytes")
def test_a_its_four_manifests_are_imported_and_planned(mover: Workspace, owners: Path) -> None:
    for name in MANIFESTS:
        file = owners / "A" / name / "manifest.json"
        theirs, ours = json.loads(file.read_text()), import_settings(mover, file, f"my-{name}")
        # A Windows drive letter is converted; other values are kept as they are.
        assert ours["model"] == "/mnt/f/Node/hivellm/expert/models/Qwen3-0.6B"
        config = theirs["training"]["config"]
        kept = {"batch_size", "gradient_accumulation_steps", "max_seq_length", "learning_rate"}
        assert {key: ours["training"][key] for key in kept} == {key: config[key] for key in kept}
        [adapter] = theirs["base_models"][0]["adapters"]
        lora = ours["training"]["lora"]
        assert lora["use_dora"] and (lora["r"], lora["alpha"]) == (adapter["r"], adapter["alpha"])
    rules = plan_run(mover, [f"my-{name}" for name in MANIFESTS])
    assert rules["train_expert"] == len(MANIFESTS)


@pytest.mark.extra("bitsandbytes")
def test_b_its_repository_is_planned_by_its_own_settings(
    mover: Workspace, owners: Path, tmp_path: Path
) -> None:
    files = {path.stem: path for path in owners.glob("B/training_config*.yaml")}
    imported = {name: import_settings(mover, path, name) for name, path in files.items()}
    training = imported["training_config_rust"]["training"]
    expected = {"warmup_steps_min": 10, "warmup_steps_max": 1000, "override_min_warmup": True}
    expected |= {"gpu_memory_threshold_large_gb": 7.0, "target_tokens": 20_000_000, "min_epochs": 3}
    assert expected.items() <= training.items()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for i in range(3):
        (tmp_path / "a.rs").write_text(f"fn f() -> i32 {{ {i} }}\n")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", f"Return {i}"], check=True)
    source = '{name: mine, kind: git, path: "%s", prompt: "{diff}", completion: "{message}"}'
    more = f", sources: [{source % tmp_path}]"
    assert plan_run(mover, ["training_config_rust"], more=more)["train_expert"] == 1


def test_b_its_json_paths_are_those_of_a_report(finished: Workspace) -> None:
    rows = re.findall(r"^\| `\.(training_[\w.]+)` \| `([\w.]+)`", PAGE, re.MULTILINE)
    assert len(rows) == 5
    report = finished.record("report.json")
    for theirs, ours in rows:
        value = report
        for key in theirs.split("."):
            value = value[key]
        assert theirs == ours
    assert (
        report["training_parameters"]["warmup_steps"] < report["training_parameters"]["total_steps"]
    )
    epochs = report["training_report"]["training"]["epoch_summaries"]
    assert len(epochs) == -(-report["training_report"]["training"]["epochs"] // 1)


OF_C = {"num_train_epochs": 3, "learning_rate": 3e-6, "batch_size": 2, "max_seq_length": 1536}
OF_D = {
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "save_steps": 2000,
    "torch_compile": True,
}


@pytest.mark.parametrize(
    ("letter", "model", "training"),
    [
        ("C", "models/phase1c_base_merged", OF_C),
        ("D", "meta-llama/Meta-Llama-3.1-8B-Instruct", OF_D),
    ],
)
def test_c_and_d_their_flags_are_planned(
    mover: Workspace, owners: Path, tmp_path: Path, letter: str, model: str, training: Any
) -> None:
    text = (owners / letter / "args.txt").read_text().split(f"# {letter}1", 1)[1]
    flags = text.partition("\n")[2].split("\n\n", 1)[0]
    flags = flags.replace("(tokenized data set on local disk)", "data/d.jsonl")
    command = tmp_path / "train.sh"
    command.write_text(f"python train.py {flags}")
    ours = import_settings(mover, command, letter)
    assert ours["model"] == model
    assert training.items() <= ours["training"].items()
    assert plan_run(mover, [letter])["train_expert"] == 1


def test_the_page_names_the_flags_of_c(owners: Path) -> None:
    flags = (owners / "C" / "args.txt").read_text()
    for flag in ("--data_path", "--model_path", "--num_epochs", "--batch_size"):
        assert flag in flags and f"`{flag}`" in PAGE


def test_e_and_own_records_in_a_shipped_manifest(mover: Workspace) -> None:
    """The page's way to train a shipped manifest on your own records."""
    write_records(mover, "data/mine.jsonl")
    [sources] = set(re.findall(r"sources: \[\{name: mine.*?\}\]", PAGE))
    names = ["small", "phase1c-cot", "phase1a"]
    rules = plan_run(mover, names, more=f", {sources}", preset="full")
    assert rules["train_expert"] == len(names) and not rules["generate_source"]
