"""docs/migration.md, walked for each replaced system with its owner's own files."""

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
# No model is fetched, and a GPU is not asked for.
TINY = "model: builtin:tiny-qwen3"


@pytest.fixture
def owners() -> Path:
    if not OWNERS.is_dir():
        pytest.skip(
            f"files of the owners are not here: {OWNERS.relative_to(ROOT.parent)} is absent"
        )
    return OWNERS


@pytest.fixture(scope="module")
def mover(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a checkout of the code, as somebody who moves over has it."""
    space = Workspace(tmp_path_factory.mktemp("mover"))
    copy_code(ROOT, space.root)
    (space.root / "data").mkdir()
    return space


def write_records(space: Workspace, path: str, **record: Any) -> None:
    """Write records in a shape of theirs; each ``#`` is the record's number."""
    lines = (json.dumps(record).replace("#", str(i)) + "\n" for i in range(25))
    file = space.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines))


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def import_settings(space: Workspace, file: Path, name: str) -> dict[str, Any]:
    """Import a file by the page's command; return the manifest."""
    output = f"config/experts/{name}.yaml"
    done = space.script("import_settings", file, "--output", output)
    assert done.returncode == 0, done.stderr
    manifest: dict[str, Any] = yaml.safe_load((space.root / output).read_text())
    return manifest


def plan_run(space: Workspace, *names: str, more: str = TINY, **settings: str) -> Counter[str]:
    """Plan the one command that makes the reports; return how often each rule would run."""
    experts = ", ".join(f"{name}: {{{more}}}" for name in names)
    config = [f"experts={{{experts}}}", "hardware=cpu", *(f"{k}={v}" for k, v in settings.items())]
    targets = [f"results/{name}/report.json" for name in names]
    return space.jobs(*targets, "--config", *config, HF_HUB_OFFLINE="1")


@pytest.mark.extra("bitsandbytes")
def test_a_its_four_manifests_are_imported_and_planned(mover: Workspace, owners: Path) -> None:
    names = [f"my-{name}" for name in MANIFESTS]
    for name in MANIFESTS:
        theirs = json.loads((owners / "A" / name / "manifest.json").read_text())
        ours = import_settings(mover, owners / "A" / name / "manifest.json", f"my-{name}")
        # Of a drive letter of Windows, and of values that are kept as they are.
        assert ours["model"] == "/mnt/f/Node/hivellm/expert/models/Qwen3-0.6B"
        config = theirs["training"]["config"]
        kept = {"batch_size", "gradient_accumulation_steps", "max_seq_length", "learning_rate"}
        assert {key: ours["training"][key] for key in kept} == {key: config[key] for key in kept}
        [adapter] = theirs["base_models"][0]["adapters"]
        lora = ours["training"]["lora"]
        assert lora["use_dora"] and (lora["r"], lora["alpha"]) == (adapter["r"], adapter["alpha"])
        [source] = ours["sources"]
        write_records(mover, source["path"], text="fact #", messages=chat("what is #?", "#"))
    rules = plan_run(mover, *names)
    assert rules["train_expert"] == len(MANIFESTS)


@pytest.mark.extra("bitsandbytes")
def test_b_its_repository_is_planned_by_its_own_settings(
    mover: Workspace, owners: Path, tmp_path: Path
) -> None:
    ours = import_settings(mover, owners / "B" / "training_config_rust.yaml", "rust")
    training = ours["training"]
    assert (training["warmup_steps_min"], training["warmup_steps_max"]) == (10, 1000)
    assert training["override_min_warmup"] and training["gpu_memory_threshold_large_gb"] == 7.0
    assert (training["target_tokens"], training["min_epochs"]) == (20_000_000, 3)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for i in range(3):
        (tmp_path / "a.rs").write_text(f"fn f() -> i32 {{ {i} }}\n")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", f"Return {i}"], check=True)
    source = '{name: mine, kind: git, path: "%s", prompt: "{diff}", completion: "{message}"}'
    more = f"{TINY}, sources: [{source % tmp_path}]"
    assert plan_run(mover, "rust", more=more)["train_expert"] == 1
    for path in owners.glob("B/training_config*.yaml"):
        import_settings(mover, path, f"b-{path.stem}")


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


def flags_of(owners: Path, letter: str, run: str) -> str:
    """Return one run's lines of an owner's list of flags."""
    text = (owners / letter / "args.txt").read_text()
    return text.split(f"# {run}", 1)[1].partition("\n")[2].split("\n\n", 1)[0]


@pytest.mark.chain
@pytest.mark.long
def test_c_its_flags_make_a_manifest_that_runs(
    mover: Workspace, owners: Path, tmp_path: Path
) -> None:
    flags = flags_of(owners, "C", "C1")
    for flag in ("--data_path", "--model_path", "--num_epochs", "--batch_size"):
        assert flag in flags and f"`{flag}`" in PAGE
    command = tmp_path / "train.sh"
    command.write_text(f"python train_phase1c_cot.py {flags}")
    ours = import_settings(mover, command, "cot")
    training = ours["training"]
    assert (training["num_train_epochs"], training["learning_rate"]) == (3, 3e-6)
    assert (training["batch_size"], training["max_seq_length"]) == (2, 1536)
    assert ours["model"] == "models/phase1c_base_merged"
    [source] = ours["sources"]
    write_records(mover, source["path"], messages=chat("What is # + 1?", "# + 1, so it is more."))
    mover.run(
        "results/cot/report.json", "--config", "hardware=cpu",
        f"experts={{cot: {{{TINY}, training: {{max_seq_length: 64, n_threads: 1}}}}}}",
    )  # fmt: skip
    report = json.loads((mover.root / "results" / "cot" / "report.json").read_text())
    assert (
        report["training_parameters"]["total_steps"]
        == report["training_report"]["training"]["steps"]
        == 9
    )
    assert (mover.root / "results" / "cot" / "report.html").is_file()


def test_d_its_flags_are_planned(mover: Workspace, owners: Path, tmp_path: Path) -> None:
    flags = flags_of(owners, "D", "D1").replace(
        "(tokenized data set on local disk)", "data/d.jsonl"
    )
    (tmp_path / "train.sh").write_text(f"python train.py {flags}")
    ours = import_settings(mover, tmp_path / "train.sh", "sft")
    assert ours["model"] == "meta-llama/Meta-Llama-3.1-8B-Instruct"
    training = ours["training"]
    assert (training["batch_size"], training["gradient_accumulation_steps"]) == (4, 2)
    assert (training["save_steps"], training["torch_compile"]) == (2000, True)
    write_records(mover, "data/d.jsonl", messages=chat("do #", "done #"))
    assert plan_run(mover, "sft")["train_expert"] == 1


def test_e_and_own_records_in_a_shipped_manifest(mover: Workspace) -> None:
    """The page's way to train a shipped manifest on records of one's own."""
    write_records(mover, "data/mine.jsonl", question="what is #?", answer="#")
    [sources] = set(re.findall(r"sources: \[\{name: mine.*?\}\]", PAGE))
    names = ("small", "phase1c-cot", "phase1a")
    rules = plan_run(mover, *names, more=f"{TINY}, {sources}", preset="full")
    assert rules["train_expert"] == len(names) and not rules["generate_source"]
