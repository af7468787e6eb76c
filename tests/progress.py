"""What make test shows: a line every 10 s, each failure at once, and one line at the end."""

import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

EVERY_S = 10.0
# How much longer a test of these folders takes than others, about: they start processes.
WORK = {"workflow": 60, "bench": 60, "studies": 15, "train": 12, "rental": 6}


def work_of(test: str) -> int:
    """Return how much of all work a test is, by its folder."""
    return WORK.get(Path(test.split("::")[0]).parent.name, 1)


class Progress:
    """Lines that a log can keep, in place of dots."""

    def __init__(self, config: pytest.Config, last_words: str) -> None:
        self._last_words = last_words
        self._start_s = self._told_s = time.monotonic()
        self._n_tests = self._n_ended = self._work = self._done = 0
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        self._write = reporter.write_line
        self._stats: dict[str, list[pytest.TestReport]] = reporter.stats

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.pytest_xdist_node_collection_finished([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._n_tests = len(ids)
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
            share = f"{100 * self._done / max(self._work, 1):3.0f} %"
            file = report.nodeid.split("::")[0]
            self._write(
                f"{share} {self._n_ended:6,} of {self._n_tests:,} tests {self._took():>6}  {file}"
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        """Write it all in one line, after what pytest says."""
        yield
        counts = [f"{len(self._stats.get('passed', ())):,} passed"]
        n_failed = sum(len(self._stats.get(kind, ())) for kind in ("failed", "error"))
        if n_failed:
            counts.append(f"{n_failed:,} failed")
        skipped = [report.longrepr for report in self._stats.get("skipped", ())]
        if skipped:
            reasons = Counter(str(why[2]).removeprefix("Skipped: ") for why in skipped if why)
            told = "; ".join(f"{n} as {reason}" for reason, n in reasons.most_common())
            counts.append(f"{len(skipped):,} skipped ({told})")
        self._write(f"{', '.join(counts)} in {self._took()}. {self._last_words}")

    def _took(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._start_s), 60)
        return f"{minutes}:{seconds:02}"
