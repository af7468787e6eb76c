"""Commands in the docs and Makefile targets run as written, in a clone."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from snakemake.cli import parse_args
from support import PATIENCE_S, ROOT, SCRIPTS, run_script
from warm_python import warm_jobs
from workflow_space import Workspace, readme_manifest

from expertflow.chain import CHAIN
from expertflow.rental.guard.options import parse_options

PATHS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in PATHS}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PROGRAMS = (
    "apt-get|aws|bash|conda|curl|docker|export|git|llama-server|make|mkdir|pip|python|rm|sbatch"
    "|snakemake|source|srun|torchrun|transformers|vllm"
)
COMMAND = re.compile(rf"(?:\$ )?((?:{PROGRAMS}) .*)")
PLUGINS = re.compile(r" --(workflow-profile|default-storage-\w+) \S+")
INDENTED = re.compile(rf"^ {{4,}}((?:{PROGRAMS}) .*)", re.MULTILINE)
INLINE = re.compile(r"`((?:python|snakemake|make) [^`]+)`")
# The recipes of this page are followed, files and commands, by test_extending.py.
ELSEWHERE = "extending.md"
# Programs that are not ours: they need root, a network or weights converted by hand.
FOREIGN = ("apt-get", "aws", "llama-server", "pip", "transformers", "vllm")
# Patterns of commands that are not run here, and why. ci: .ci/run runs it; sketch: to be filled in
# first; another test's name: it runs that.
NOT_RUN = {
    r"make (test|mutants)|bash \.ci/run": "minutes",
    r"make (test-all|lint|slurm-test)": "ci",
    r"snakemake .*(…|/path/to/).*": "sketch",
    r"snakemake (?!.* -n ).* results/expert-json/ablation.*": "minutes",
    r"snakemake .*hardware=H100 SXM( experts=.*)?": "network, a card or a cluster",
    r"snakemake -s workflow/remote\.smk .*": "test_bundles.py",
    r"snakemake --workflow-profile profiles/cluster-generic": "test_cluster_generic.py",
    r"snakemake --report report\.zip": "test_whole_runs.py",
    r"python tests/slurm/cluster\.py": "root",
    r"python convert_hf_to_gguf\.py .*": "network",
    r"python workflow/scripts/guard_run\.py .*": "network",
    r"python workflow/scripts/pretokenize_files\.py .*": "test_rows_alone.py",
    r"python workflow/scripts/open_bundle\.py --outcome outcome\.tar": "test_bundles.py",
    r"python workflow/scripts/push_expert\.py .*": "network",
    r"python bench/.*": "minutes, a card or a network",
}
# Run before the commands of a page, to make the files that it mentions.
TWO_RECORDS = (
    "python workflow/scripts/monitor_gpu.py --duration 0.1 --output before.json"
    " && cp before.json after.json"
)
PREPARED = {
    "bundles.md": (
        "snakemake --cores 2 results/expert-sql/bundle.tar && mv results/expert-sql/bundle.tar ."
        " && rm -r results state"
    ),
    "monitoring.md": TWO_RECORDS,
    "migration.md": f"{TWO_RECORDS} && echo 'base_model: Qwen/Qwen3-0.6B' > qlora.yml",
    "serving.md": "echo 'How many customers are there?' > question.txt",
}
# Pages whose commands change files that other pages use.
OWN_PLACE = ("README.md", "bundles.md")
# A minute's monitoring is a second here, and few steps are as good as many; the smallest expert,
# which has all results, replaces any.
STANDS_FOR = {
    "--duration 60": "--duration 1", "{expert}": "expert-sql", "expert-json": "expert-sql",
    "results/phase1c-cot": "results/expert-sql", "--max-steps 200": "--max-steps 2",
    "--num-train-epochs 3": "--num-train-epochs 0.1",
    "report.json --forcerun train_expert": "training.json --forcerun train_expert",
}  # fmt: skip
# The rules that the README's commands run.
BY_RULE = {stage.name for stage in CHAIN if not stage.asked}
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
EXTRAS = ("bitsandbytes", "slurm", "s3", "node", "graph", "lm-eval", "triton")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
MADE_HERE = {
    "demo", "demos", "help", "install", "run", "plan", "compare", "verify", "repair", "prune",
    "clean",
}  # fmt: skip
# .ci/run makes the parts of test-all, and coverage, which covers test; mutants take hours, and
# test_resume.py plays rounds of soak.
BY_HAND = {"mutants", "test", "test-all", "soak"}


def commands(page: str) -> Iterator[str]:
    """Yield the commands of a page: in code blocks, running text and indented lines."""
    for indent, kind, text in FENCE.findall(PAGES[page]):
        exports = ""
        for line in text.replace("\\\n", " ").splitlines():
            found = COMMAND.fullmatch(line.removeprefix(indent))
            assert found or kind not in ("sh", "bash"), f"{page}: what is {line!r}?"
            if found and found[1].startswith("export "):
                exports += f"{found[1].split(' #')[0].rstrip()} && "
            elif found:
                yield exports + found[1]
    rest = FENCE.sub("", PAGES[page])
    yield from INLINE.findall(rest)
    yield from INDENTED.findall(rest.replace("\\\n", " "))


def plain(command: str) -> str:
    """Return a command without comments, exports, quotes and the spaces between its words."""
    return " ".join(shlex.split(command, comments=True)).rpartition(" && ")[2]


def why_not_run(command: str) -> str | None:
    reasons = [why for text, why in NOT_RUN.items() if re.fullmatch(text, plain(command))]
    return reasons[0] if reasons else None


def runnable(page: str) -> list[str]:
    ours = [c for c in commands(page) if plain(c).split()[0] not in FOREIGN]
    return [command for command in ours if why_not_run(command) is None]


def run(place: Path, command: str) -> str:
    """Run a command, which must succeed; return its output."""
    programs = f"{place}/.venv/bin:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, **warm_jobs()}
    # Not in the clone: a socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            ["bash", "-euc", command], cwd=place, capture_output=True, text=True,
            env={**environment, "TMPDIR": scratch}, timeout=PATIENCE_S,
            input="How many customers are there?\n",
        )  # fmt: skip
    # The page shows a wrong claim.
    is_found_wrong = done.returncode == 1 and "check_claims" in command and not done.stderr
    output = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0 or is_found_wrong, f"{command}\n{output}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone in which ``make demo`` was run, with few and short steps."""
    place = tmp_path_factory.mktemp("demo") / "clone"
    place.mkdir()
    # Tracked files, with an installation whose stamps say that it is complete.
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place / name)
    (place / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != ".gitignore" and not path.name.startswith("."):
            (place / ".venv" / path.name).symlink_to(path)
    for name in ("installed", "plugin", *EXTRAS, "test", "coverage", "dev"):
        (place / ".venv" / f".{name}").touch()
    (place / "config" / "config.yaml").write_text("experts: {expert-sql: {}}\n")
    rule = place / "workflow" / "rules" / "tune.smk"
    limited = 'wf.command("tune_expert", "--max-seconds 0 2> {log:q}", on_card=True)'
    rule.write_text(rule.read_text().replace('wf.command("tune_expert", on_card=True)', limited))
    path = place / "config" / "experts" / "expert-sql.yaml"
    manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
    demo = manifest["demo"]
    demo["sources"][0]["n_documents"] = 400
    demo["data"]["eval_fraction"] = 0.1
    demo["training"] |= {"max_steps": 6, "n_threads": 1, "eval_steps": 6, "save_steps": 6}
    demo["evaluation"] |= {"max_examples": 4, "n_selection_examples": 4, "max_new_tokens": 4}
    path.write_text(yaml.safe_dump(manifest))
    assert "verdict" in run(place, "make demo")
    return place


def copy_clone(demo: Path, target: Path) -> Path:
    return Path(shutil.copytree(demo, target, symlinks=True))


@pytest.fixture
def clone(demo: Path, tmp_path: Path) -> Path:
    return copy_clone(demo, tmp_path / "clone")


@cache
def flags(script: str) -> frozenset[str]:
    if script.startswith("bench/"):  # --help of some scripts imports torch first
        text = (ROOT / script).read_text(encoding="utf-8")
    else:
        text = run_script(Path(script).stem, "--help").stdout
    return frozenset(re.findall(r"--[\w-]+", text))


@pytest.mark.parametrize("page", PAGES)
def test_programs_support_the_options_on_a_page(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        words = plain(command).split("…")[0].split()
        if why_not_run(command) == "sketch":
            continue
        if words[0] == "make":
            assert re.search(rf"^\.PHONY:.* {words[1]}( |$)", MAKEFILE, re.MULTILINE), command
        elif words[0] == "snakemake":
            # Plugins need not be installed; test_profiles.py reads profiles.
            rest = PLUGINS.sub("", command.rpartition(" && ")[2])
            parse_args(shlex.split(rest, comments=True)[1:])
        elif words[1:] and words[1].startswith(("workflow/scripts/", "bench/")):
            assert (ROOT / words[1]).is_file(), command
            own = words[: words.index("--")] if "--" in words else words
            known = flags(words[1])
            assert {word for word in own if word.startswith("--")} <= known, command
        if "guard_run.py" in words[1:2]:
            assert parse_options(words[2:], None).command[0] == "snakemake"


def test_every_script_is_run_by_a_test_and_skipped_commands_are_still_on_a_page() -> None:
    written = [plain(command) for page in PAGES for command in commands(page)]
    for pattern in NOT_RUN:
        assert any(re.fullmatch(pattern, command) for command in written), pattern
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    texts += [command for page in PAGES for command in runnable(page)]
    for name in {path.stem for path in SCRIPTS.glob("*.py")} - BY_RULE:
        assert any(re.search(rf'["/]{name}(\.py\b|")', text) for text in texts), name


WITH_COMMANDS = [page for page in PAGES if page != ELSEWHERE and runnable(page)]


@pytest.fixture(scope="module")
def shared(demo: Path) -> Path:
    """Return a clone for the commands of all pages that leave it usable."""
    return copy_clone(demo, demo.with_name("shared"))


# Once for all pages that share a clone.
run_once = cache(run)


@pytest.mark.long
@pytest.mark.chain
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_of_a_page_work(page: str, demo: Path, shared: Path, tmp_path: Path) -> None:
    place = copy_clone(demo, tmp_path / "clone") if page in OWN_PLACE else shared
    if page == "README.md":
        text = readme_manifest()
        for given, faster in (("train_epochs: 30", "train_epochs: 1"), ("n: 0.2", "n: 0.02")):
            assert given in text
            text = text.replace(given, faster)
        (place / "config" / "experts" / "mine.yaml").write_text(text)
    if page in PREPARED:
        run(place, PREPARED[page])
    for command in runnable(page):
        given = " ".join(command.partition(" #")[0].split())
        for word, other in STANDS_FOR.items():
            given = given.replace(word, other)
        output = run_once(place, given)
        shown = PAGES[page].partition(f"$ {command}\n")[2].partition("```")[0]
        assert shown in output
    if page == "README.md":
        report = json.loads((place / "results" / "mine" / "report.json").read_text())
        assert report["run"]["preset"] == "full"
        sidecars = (place / "results").rglob(".*.fingerprint")
        rules = {json.loads(path.read_text())["rule"] for path in sidecars}
        assert rules == {*BY_RULE, "lock"}
        assert (place / "results" / "index.html").is_file()


def test_every_target_is_made_by_a_test_or_before_a_change_lands() -> None:
    needs = dict(re.findall(r"^([\w-]+):([^:=\n]*)$", MAKEFILE, re.MULTILINE))
    made = set(re.findall(r"^(?:\w+=\S+ )?(?:make|step|beside) ([\w-]+)", CI, re.MULTILINE))
    for target in list(made):
        made |= set(needs.get(target, "").split())
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony
    assert not set(phony[1].split()) - MADE_HERE - {*EXTRAS} - made - BY_HAND


@pytest.mark.long
@pytest.mark.chain
def test_targets_are_made(clone: Path) -> None:
    # Pages plan with the cluster profiles; test_profiles.py reads the others.
    for name in ("default", "rented"):
        profile = ("-F", "--workflow-profile", f"profiles/{name}")
        assert Workspace(clone).jobs(*profile)["train_expert"]
    listed = run(clone, "make -s help")
    for target in re.findall(r"^([\w-]+):", MAKEFILE.replace("\nsay:", ""), re.MULTILINE):
        assert re.search(rf"^make {target} ", listed, re.MULTILINE), target
    for target in ("install", *EXTRAS):
        # Their stamps are newer than the locks, so there is nothing to install.
        assert "pip" not in run(clone, f"make {target}")
    assert run(clone, "make -s verify").endswith(": intact\n")
    merged = clone / "results" / "expert-sql" / "merged" / "config.json"
    whole = merged.read_bytes()
    merged.write_bytes(whole.replace(b"qwen3", b"qwen4"))
    assert f"removed {merged.relative_to(clone)}" in run(clone, "make -s repair")
    run(clone, "make demo")
    assert merged.read_bytes() == whole
    orphan = clone / "state" / "expert-sql" / "old"
    orphan.mkdir()
    (orphan / "outcome.json").write_text("{}")
    assert "removed state/expert-sql/old" in run(clone, "make prune")
    assert not orphan.exists()
    assert "Nothing to be done" in run(clone, "make demo")
    run(clone, "make demos")
    assert "results/compare.html" in run(clone, "make compare A=expert-sql B=./results/expert-sql")
    assert (clone / "results" / "index.html").is_file()
    run(clone, "make clean")
    assert not [name for name in ("results", "state", ".snakemake") if (clone / name).exists()]
