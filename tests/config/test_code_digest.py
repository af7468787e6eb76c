import json
from pathlib import Path

import pytest
from support import SCRIPTS

from expertflow.config import code_digest
from expertflow.config.code_digest import RESOURCES, list_imports, other_code, rule_digest


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    package = tmp_path / "expertflow"
    package.mkdir()
    (package / "a.py").write_text('"""A."""\nfrom expertflow import b\n')
    (package / "b.py").write_text("def f():\n    return 1\n")
    (package / "c.py").write_text("x = 1\n")
    (tmp_path / "job.py").write_text("from expertflow.a import b\n")
    return tmp_path


def digest_after(scripts: Path, name: str, text: str) -> str:
    (scripts / name).write_text(text)
    code_digest._read_module.cache_clear()
    return rule_digest("job", scripts)


def test_code_counts_and_comments_do_not(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code_digest._read_module.cache_clear()
    first = rule_digest("job", scripts)
    with monkeypatch.context() as patched:
        # The order of the set of imports differs between processes.
        found = sorted(list_imports(scripts / "job.py", scripts), reverse=True)
        patched.setattr(code_digest, "list_imports", lambda *_: found)
        assert rule_digest("job", scripts) == first
    b = "expertflow/b.py"
    assert digest_after(scripts, b, "# note\ndef f():\n\n    return 1  # one\n") == first
    assert digest_after(scripts, b, 'def f():\n    """Say one."""\n    return 1\n') == first
    assert digest_after(scripts, "expertflow/c.py", "x = 2\n") == first
    assert digest_after(scripts, b, "def f():\n    return 2\n") != first
    within = digest_after(scripts, b, "if x:\n    f()\n    g()\n")
    assert digest_after(scripts, b, "if x:\n    f()\nelse:\n    g()\n") != within


def test_members_of_a_folder_count_as_imports(scripts: Path) -> None:
    (scripts / "expertflow" / "kinds").mkdir()
    first = digest_after(scripts, "job.py", 'kinds = import_members("expertflow.kinds")\n')
    code_digest._module_paths.cache_clear()
    code_digest._imported.cache_clear()
    second = digest_after(scripts, "expertflow/kinds/one.py", "from expertflow import b\n")
    assert second != first
    assert digest_after(scripts, "expertflow/b.py", "x = 3\n") != second


def test_other_files_that_a_script_reads_count(
    scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = scripts / "expertflow" / "pages" / "page.css"
    page.parent.mkdir()
    page.write_text("a {}")
    monkeypatch.setitem(RESOURCES, "b.py", "pages/*")
    first = rule_digest("job", scripts)
    page.write_text("b {}")
    assert len(first) == 16 and rule_digest("job", scripts) != first


def test_every_template_belongs_to_a_rule_and_other_code_is_named() -> None:
    library = SCRIPTS / "expertflow"
    named = {path for name in RESOURCES.values() for path in library.glob(name)}
    assert named == {path for path in library.rglob("*.*") if path.suffix in (".j2", ".css")}
    readers = {"export_model": "export/card.py"}
    readers |= dict.fromkeys(
        ("build_report", "ablate_expert", "compare_experts"), "report/sheet.py"
    )
    for rule, module in readers.items():
        assert module in RESOURCES
        assert library / module in list_imports(SCRIPTS / f"{rule}.py", SCRIPTS)
    here = {name: rule_digest(name) for name in ("pack_sequences", "generator arithmetic")}
    assert len(set(here.values())) == 2 and not other_code(here)
    made_by = {**here, "plan_training": "of before", "generator gone": "0", "gone": "0"}
    assert other_code(made_by) == ("generator gone", "gone", "plan_training")


def test_every_module_counts_as_code_of_a_script_and_generators_as_their_own() -> None:
    seen = {path for script in SCRIPTS.glob("*.py") for path in list_imports(script, SCRIPTS)}
    library = SCRIPTS / "expertflow"
    for room in ("tokens", "train", "evaluate", "export", "studies", "report"):
        modules = {path for path in (library / room).rglob("*.py") if path.name != "__init__.py"}
        only_measured_with = {library / "train" / "trace" / "flops.py"}
        assert modules - seen - only_measured_with == set()
    found = list_imports(SCRIPTS / "generate_source.py", SCRIPTS)
    assert not [path for path in found if "generated" in path.parts]
    assert library / "data" / "sources" / "registry.py" in found


def test_parsed_modules_outlive_their_process_and_a_damaged_file(scripts: Path) -> None:
    (scripts / "no folder").write_text("")
    nowhere, unsaved = code_digest.ParsedModules(), code_digest.ParsedModules()
    nowhere.read(scripts / "expertflow" / "b.py")
    nowhere.save()
    unsaved.keep_in(scripts / "no folder" / "code.json")
    assert unsaved.read(scripts / "expertflow" / "b.py")[1] == []
    unsaved.save()
    kept, module = scripts / "state" / "code.json", scripts / "expertflow" / "a.py"
    for left in (None, "{", None):
        if left is not None:
            kept.write_text(left)
        modules = code_digest.ParsedModules()
        modules.keep_in(kept)
        sha256, imports = modules.read(module)
        modules.save()
        assert imports == ["expertflow", "expertflow.b"]
        known = json.loads(kept.read_text())
        assert [entry[0] for entry in known.values()] == [sha256]
