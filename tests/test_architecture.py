"""Rules on imports: data flows one way, and heavy packages are imported in one place."""

import ast
import doctest
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "workflow" / "scripts"
# From the ground up. A package imports only packages on lower levels.
FLOORS = (
    "core < data hardware < staging chain < tokens < plan < train < evaluate < export < studies"
    " < report < rental < config"
)
FLOOR_OF = {room: i for i, rooms in enumerate(FLOORS.split(" < ")) for room in rooms.split()}
# What a package may import from packages below it, besides their records.
PUBLIC = {
    "data": "cache checks.cypher checks.json_schema checks.typescript documents layout reject"
    " render settings shapes shards",
    "tokens": "arrow engine packing ragged tokenize tokenizer",
    "staging": "content ensure store",
    "hardware": "card_locks disk gpu_table monitor nvml probe",
    "evaluate": "answer_text generate scoring statistics",
    "plan": "claims cost draft flops memory override resolve settings step_time switches tuned",
    "train": "device feed.batches feed.loader feed.on_the_fly job memory_trace model.base"
    " model.load model.loss model.packed model.weights processes run saved.checkpoint_files trial",
}
# Tables of choices for settings. They do not import torch, and any package may read them.
DECLARATIONS = {"train.optimizers"}
# The Snakefile's own package resolves settings and locks sources, so it imports from data.
CONFIG_MAY_USE = {
    "data": "checks.registry lock shapes shards sources.registry", "hardware": "gpu_table",
    "plan": "switches", "train": "model.base model.init_adapter", "rental": "bundle.records",
}  # fmt: skip
DOORS = {
    "torch": r"train/|export/|evaluate/(ask_models|generate|likelihood)",
    "pynvml": "hardware/nvml",
    "altair": "report/charts/",
    "pandas": "report/charts/",
    "accelerate": "train/processes",
    "datasets": "data/sources/hub",
}
FILES = sorted((ROOT / "expertflow").rglob("*.py"))


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            if node.module.startswith("expertflow"):
                names |= {f"{node.module}.{a.name}" for a in node.names}
    return names


def project_imports(path: Path) -> set[str]:
    result = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "expertflow" and ROOT.joinpath(*parts).with_suffix(".py").is_file():
            result.add(".".join(parts[1:]))
    return result


def names_of(modules: dict[str, str], room: str) -> list[str]:
    return modules.get(room, "").split()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_run_downward(path: Path) -> None:
    room = path.relative_to(ROOT / "expertflow").with_suffix("").parts[0]
    for module in project_imports(path):
        other = module.split(".")[0]
        if other in (room, "core") or module in DECLARATIONS:
            continue
        assert room != "core", f"core imports {module}"
        assert FLOOR_OF[other] < FLOOR_OF[room], f"{path} imports {module}: not downward"
        rest = module.removeprefix(f"{other}.")
        allowed = module.endswith(".records") or module == other or rest in names_of(PUBLIC, other)
        if room == "config":
            allowed |= rest in names_of(CONFIG_MAY_USE, other)
        assert allowed, f"{path} imports {module}, which is private to its room"


def test_packages_have_no_import_cycles() -> None:
    """Modules and subpackages of a package: their imports do not lead back to them."""

    def place(module: str) -> str:
        return ".".join(module.split(".")[:2])

    below: dict[str, set[str]] = {}
    for path in FILES:
        module = ".".join(path.relative_to(ROOT / "expertflow").with_suffix("").parts)
        own_room = f"{module.split('.')[0]}."
        others = {place(m) for m in project_imports(path) if m.startswith(own_room)}
        below.setdefault(place(module), set()).update(others - {place(module)})
    while ends := {one for one, others in below.items() if not others & below.keys()}:
        below = {one: others for one, others in below.items() if one not in ends}
    assert not below, f"these lead back to themselves: {sorted(below)}"


def test_heavy_packages_are_imported_in_one_place_and_not_in_core() -> None:
    for path in FILES:
        place = path.relative_to(ROOT / "expertflow").as_posix()
        packages = {name.split(".")[0] for name in imports(path)}
        for package in packages & DOORS.keys():
            assert re.match(DOORS[package], place), f"{place} imports {package}"
        if place.startswith("core/"):
            assert packages <= {*sys.stdlib_module_names, "msgspec", "expertflow"}, place
        if path.name == "__init__.py":
            assert path.stat().st_size == 0, f"{path} is not empty: import fan-in is rerun cost"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400, f"{path} is longer than 400 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{path}:{node.name} is too long"


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda p: p.name)
def test_scripts_stay_thin(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= 60, f"{path}: logic belongs in a room"


@pytest.mark.parametrize(
    "path", [p for p in FILES if ">>> " in p.read_text("utf-8")], ids=lambda path: path.stem
)
def test_examples_in_docstrings_work(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert doctest.testmod(importlib.import_module(name)).failed == 0
