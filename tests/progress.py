"""The output of make test: a line every 10 s, each failure at once, and what to run next."""

import time
from collections.abc import Generator
from pathlib import Path

import pytest

EVERY_S = 10.0
# Roughly how much longer tests of these folders or files take than others: they start processes,
# and one compiles for minutes and must not start last.
WORK = {"workflow": 60, "bench": 60, "studies": 15, "train": 12, "rental": 6}
WORK |= {"test_without_a_card.py": 1200}


def work_of(test: str) -> int:
    """Return a test's relative amount of work, by its file and folder."""
    path = Path(test.split("::")[0])
    return WORK.get(path.name) or WORK.get(path.parent.name, 1)


class Progress:
    """Lines for a log, in place of dots."""

    def __init__(self, config: pytest.Config, last_words: str) -> None:
        self._last_words = last_words
        self._told_s = time.monotonic()
        self._n_ended = self._work = self._done = 0
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        self._write = reporter.write_line

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.pytest_xdist_node_collection_finished([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._work = sum(map(work_of, ids))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.when != "call" and report.passed:
            return "", "", ""
        return ("error" if report.failed and report.when != "call" else report.outcome), "", ""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(f"FAILED  {report.nodeid}")
        if report.when != "teardown":
            return
        self._n_ended += 1
        self._done += work_of(report.nodeid)
        if time.monotonic() - self._told_s >= EVERY_S:
            self._told_s = time.monotonic()
            percent, file = 100 * self._done / max(self._work, 1), report.nodeid.split("::")[0]
            self._write(f"{percent:3.0f} % {self._n_ended:6,} tests  {file}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        """Print what to run next, after pytest's counts."""
        yield
        if self._last_words:
            self._write(self._last_words)
