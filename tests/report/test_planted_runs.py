"""Each planted trouble is found, with advice that fits, and nothing else is; see planted_runs."""

import re
from pathlib import Path

import pytest
from planted_runs import RUNS, Planted
from support import SCRIPTS

from expertflow.report.build import build_report
from expertflow.report.check import check_report

FINDINGS = SCRIPTS / "expertflow" / "report" / "findings"


@pytest.mark.parametrize("planted", RUNS, ids=[planted.name for planted in RUNS])
def test_only_the_planted_problem_is_found(planted: Planted) -> None:
    inputs = planted.run.change(**planted.change)
    report = build_report(inputs, {})
    check_report(report, inputs)
    found = {finding.code: finding for finding in report.findings}
    assert set(found) == set(planted.must.split())
    if planted.must:
        first = found[planted.must.split()[0]]
        assert planted.words in f"{first.evidence}; {first.recommendation}"


def test_every_finding_is_planted_and_many_runs_have_none() -> None:
    text = "".join(path.read_text() for path in Path(FINDINGS).glob("*.py"))
    codes = set(re.findall(r'(?:make_finding|LostTime)\(\s*"([a-z-]+)"', text))
    planted = {code for run in RUNS for code in run.must.split()}
    assert planted == codes and len(codes) > 40
    assert len(RUNS) >= 40 and sum(not run.must for run in RUNS) >= 15
