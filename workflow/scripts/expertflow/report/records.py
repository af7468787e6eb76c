"""What the report adds to the records it reads: findings and acceptance verdicts."""

from typing import Any, Literal

from expertflow.core.records import Record


class Finding(Record, frozen=True, kw_only=True):
    """Something worth changing, with what was seen and where the threshold comes from.

    ``worth_usd`` is the price of time that was measured as lost: the most that a fix can save.
    ``worth_reason`` says how it was reckoned, or why there is none.
    """

    code: str
    severity: Literal["info", "warning", "problem"]
    evidence: str
    threshold: str
    threshold_origin: str
    recommendation: str
    worth_usd: float | None
    worth_reason: str | None


class AcceptanceRule(Record, frozen=True, kw_only=True):
    """A bar of the manifest, over a dotted path of report.json."""

    path: str
    op: Literal[">", ">=", "<", "<=", "=="]
    value: Any


class AcceptanceVerdict(Record, frozen=True, kw_only=True):
    """``not measured`` where the path holds null."""

    rule: str
    verdict: Literal["pass", "fail", "not measured"]
    value: Any


class ReportSpec(Record, frozen=True, kw_only=True):
    """Settings of ``build_report``."""

    expert: str
    preset: str
    description: str
    acceptance: tuple[AcceptanceRule, ...]
