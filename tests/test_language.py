"""Code and documents use the words of docs/glossary.md."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support import ROOT

WEAK_BEGINNINGS = re.compile(r"(Give|Say|Tell|Put|Let)s?\b")
BRITISH = re.compile(
    r"\b\w*(?:licenc|artefact|colour|behaviour|neighbour|favour|honour|catalogue|judgement|grey|centre"
    r"|labell|modell|travell|(?:token|optim|normal|quant|summar|initial|util|recogn|organ|serial"
    r"|material|pseudonym|general|character|minim|maxim|memor|real|standard)is(?:e|ed|es|er|ers|ing|ation)\b)\w*",
    re.IGNORECASE,
)
# Former keys of manifests, file names of licenses, columns of generated tables, a libc name.
FOREIGN_FILES = {
    "CHANGELOG.md",
    "workflow/scripts/expertflow/config/other_trainers.yaml",
    "workflow/scripts/expertflow/data/sources/generated/sql_tables.py",
    "workflow/scripts/expertflow/train/model/base.py",
    "tests/train/test_base.py",
}
PARTICIPLE = re.compile(
    r"(?!(?:need|feed|seed|speed|embed|shed|exceed|proceed|bed|red)$)\w+ed|kept|held|said|laid|found"
    r"|made|given|seen|known|taken|left|lost|paid|told|sent|spent|built|written|spelt|drawn|shown"
)
MAX_ONE_WORD_FRACTION = 0.25


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@cache
def trees(where: str) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in tracked(f"{where}/*.py")}


def definitions(
    tree: ast.Module,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield classes and functions of a module and its classes, not those within functions."""
    found: list[ast.stmt] = list(tree.body)
    for node in found:
        if isinstance(node, ast.ClassDef):
            found += node.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def public_functions() -> Iterator[tuple[Path, str]]:
    """Yield every public function and method of the library, except properties."""
    for path, tree in trees("workflow").items():
        for node in definitions(tree):
            # A function with a capital letter acts as a class.
            if isinstance(node, ast.ClassDef) or not node.name[0].islower():
                continue
            if not any("property" in ast.unparse(one) for one in node.decorator_list):
                yield path, node.name


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("where", ["workflow", "tests", "bench"])
def test_docstrings_begin_with_what_happens(where: str) -> None:
    weak = [
        f"{shown(path)}: {text.splitlines()[0]}"
        for path, tree in trees(where).items()
        for node in [tree, *definitions(tree)]
        if (text := ast.get_docstring(node)) and WEAK_BEGINNINGS.match(text)
    ]
    assert not weak, "\n".join(weak)


def occurrences(pattern: re.Pattern[str], paths: list[Path]) -> str:
    texts = {shown(path): path.read_text(encoding="utf-8") for path in paths}
    return "\n".join(f"{n}: {found[0]}" for n, t in texts.items() for found in pattern.finditer(t))


def test_spelling_is_american() -> None:
    texts = tracked("*.py", "*.smk", "Snakefile", "*.md", "*.yaml", "*.j2", "Makefile")
    foreign = {Path(__file__), *(ROOT / name for name in FOREIGN_FILES)}
    assert not occurrences(BRITISH, [path for path in texts if path not in foreign])


def test_forbidden_words_are_not_used() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| not ([^|]+) \|$", page, re.MULTILINE)
    words = [word for row in rows for word in re.findall(r"`([^`]+)`", row)]
    assert len(words) > 20
    pattern = re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in words))
    texts = tracked("workflow/*.py", "workflow/*.smk", "Snakefile", "docs/*.md", "README.md")
    assert not occurrences(pattern, [path for path in texts if path.name != "glossary.md"])


def test_a_class_name_occurs_once() -> None:
    names = Counter(
        node.name
        for tree in trees("workflow").values()
        for node in definitions(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, n in names.items() if n > 1]


def test_functions_are_named_by_a_verb_and_most_by_its_object() -> None:
    named = [(shown(path), name) for path, name in public_functions() if name != "main"]
    assert not [one for one in named if PARTICIPLE.fullmatch(one[1].split("_")[0])]
    assert sum("_" not in name for _, name in named) <= MAX_ONE_WORD_FRACTION * len(named)
