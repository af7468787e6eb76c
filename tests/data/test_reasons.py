"""Every reason for which a record is left out stands in the documentation."""

import ast
import re

from support import ROOT, SCRIPTS

from expertflow.data.columns import STATUS

DOCUMENTED = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "data.md").read_text(encoding="utf-8")))


def reasons() -> set[str]:
    """Read the codes off the calls that make a reject."""
    found: set[str] = set()
    for path in (SCRIPTS / "expertflow" / "data").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                reason = node.args[0] if node.func.id in ("Reject", "Filtered") else None
                if isinstance(reason, ast.Constant):
                    found.add(reason.value)
    return found


def test_every_reason_is_documented() -> None:
    assert len(reasons()) > 30
    assert reasons() - DOCUMENTED == set()


def test_every_reason_to_drop_a_document_is_documented() -> None:
    assert set(STATUS) - {"kept"} - DOCUMENTED == set()
