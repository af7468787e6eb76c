"""Judge TypeScript by the tests of its record: both run as one program, in a sandbox.

Node strips the types inside the sandbox too. Types are not checked: the tests decide.
"""

import json
import os
import secrets
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from expertflow.core.errors import EvaluationError
from expertflow.core.records import Record
from expertflow.evaluate.apart.sandbox import Ended, Sandbox, SandboxLimits, bubblewrap_version
from expertflow.evaluate.records import Verdict, wrong_verdict
from expertflow.evaluate.text import strip_code_fence
from expertflow.evaluate.typescript.node import OPTIONS, find_node
from expertflow.evaluate.typescript.node_runner import RUNNER

MAX_CHARS = 200_000
_MOST_AT_ONCE = 4
# A program that a signal ended exits with this plus the signal, as in a shell.
_CODE_OF_SIGNAL = 128
_PROGRESS = ("started", "parsed", "passed")
_FAILURES = ("did_not_parse", "failed_tests", "raised", "ended_early")
_SAID = (*_PROGRESS, *_FAILURES, "tests_did_not_parse")
# Runs where a program would, and sees what a program would see.
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


class TestedProgram(Record, frozen=True, kw_only=True):
    """What the model wrote, the code that it completes, and the tests of both."""

    document_id: str
    prediction: str
    prefix: str
    tests: str


@cache
def hindrance() -> str | None:
    """Say why no program can be run here; nothing if one can, as one just did."""
    tests = "import * as assert from 'assert'"
    program = TestedProgram(document_id="probe", prediction=_PROBE, prefix="", tests=tests)
    try:
        with Sandbox(find_node().path, SandboxLimits()) as sandbox:
            verdict = _judge(program, sandbox)
    except EvaluationError as error:
        return str(error)
    except OSError as error:
        # A root without other users, a temporary folder too small for a copy of Node, and the like.
        return f"the sandbox cannot be started here: {error}"
    if verdict.correct:
        return None
    return f"the sandbox does not confine what it should: {verdict.kind} ({verdict.detail})"


def tools() -> dict[str, str]:
    """Give the versions of what runs the programs."""
    return {"node": find_node().version, "bubblewrap": bubblewrap_version()}


def judge_programs(
    programs: Sequence[TestedProgram], limits: SandboxLimits | None = None
) -> list[Verdict]:
    """Run each program with its tests, some at once, and return the verdicts in order.

    A program is the prefix with what the model wrote, its code fence removed, or what the model
    wrote alone, if that holds the prefix already or only makes a program without it. It must be
    complete before the tests follow.

    Kinds: ``correct`` (all tests ran, and the program ended without an error), ``failed_tests`` (an
    assertion), ``raised`` (any other error), ``did_not_parse``, ``ended_early`` (before its tests
    were through), ``timed_out``, ``out_of_memory``, ``too_much_output``, ``empty``.

    Raises:
        EvaluationError: nothing can be run here, or a record's tests are not TypeScript.
    """
    if not programs:
        return []
    if (reason := hindrance()) is not None:
        raise EvaluationError(reason)
    n_at_once = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)) + 1)
    with (
        Sandbox(find_node().path, limits or SandboxLimits()) as sandbox,
        ThreadPoolExecutor(n_at_once) as pool,
    ):
        return list(pool.map(lambda program: _judge(program, sandbox), programs))


def _judge(program: TestedProgram, sandbox: Sandbox) -> Verdict:
    said = strip_code_fence(program.prediction)
    if not said.strip():
        return wrong_verdict("empty")
    if len(said) > MAX_CHARS:
        return wrong_verdict("did_not_parse", f"longer than {MAX_CHARS:,} characters")
    proof = secrets.token_hex(16)
    given = json.dumps({"prefix": program.prefix, "said": said, "tests": program.tests})
    ended = sandbox.run([*OPTIONS, "-e", RUNNER], (proof + given).encode("ascii"))
    reports = _reports(ended.output, proof)
    if not reports:
        # The runner reports before it looks at the program, which is therefore not to blame.
        said_instead = " ".join(ended.output.decode("utf-8", "replace").split())[:200]
        raise EvaluationError(
            f"the sandbox does not work here ({ended.how}, {ended.exit_code}): "
            f"{said_instead or 'it says nothing'}"
        )
    detail = reports[-1][1]
    # Said before the program starts, or not at all: the program may not end the evaluation.
    if [kind for kind, _ in reports] == ["started", "tests_did_not_parse"]:
        raise EvaluationError(
            f"document {program.document_id}: its tests are not TypeScript ({detail}); "
            "repair or remove the record"
        )
    return _verdict(ended, reports)


def _reports(output: bytes, proof: str) -> list[tuple[str, str]]:
    # Behind the last line's end, a line may have been cut off.
    lines = output.decode("utf-8", "replace").split("\n")[:-1]
    return [_report(line[len(proof) :]) for line in lines if line.startswith(f"{proof} ")]


def _report(text: str) -> tuple[str, str]:
    """Read what was said; the program may have had a hand in it, so it may be anything."""
    try:
        report = json.loads(text)
        kind, detail = report["kind"], report["detail"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "malformed", ""
    if kind not in _SAID or not isinstance(detail, str):
        return "malformed", ""
    return kind, _one_line(detail)


def _verdict(ended: Ended, reports: list[tuple[str, str]]) -> Verdict:
    """Judge by all that was said: whatever is said besides, one failure is a failure."""
    for kind, detail in reports:
        if kind in _FAILURES:
            return wrong_verdict(kind, detail)
        if kind not in _PROGRESS:
            return wrong_verdict("ended_early", "its report cannot be read")
    if ended.how != "exited":
        return wrong_verdict(ended.how)
    said = [kind for kind, _ in reports]
    if said == ["started", "parsed", "passed"] and ended.exit_code == 0:
        return Verdict(correct=True, kind="correct")
    return wrong_verdict(*_death(ended))


def _death(ended: Ended) -> tuple[str, str]:
    """Tell how a program ended that did not fail by an error in its tests."""
    code = ended.exit_code or 0
    if code == _CODE_OF_SIGNAL + signal.SIGXCPU:
        return "timed_out", "ran out of processor time"
    if b"out of memory" in ended.output or b"Allocation failed" in ended.output:
        return "out_of_memory", ""
    if code == 1:
        return "raised", "an error nobody caught"
    return "ended_early", f"code {code}"


def _one_line(message: str) -> str:
    return " ".join(message.split())[:200]
