"""TypeScript is judged by its tests, which must run to their end to pass.

The sandbox is also tested without Node's permissions.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from cheating_programs import read_blocks
from made_up_documents import score

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.isolation import sandbox as sandbox_module
from expertflow.evaluate.isolation.sandbox import Ended, Sandbox, SandboxLimits
from expertflow.evaluate.records import Judgment
from expertflow.evaluate.tasks import typescript_tests
from expertflow.evaluate.tasks.typescript_tests import TypeScriptTests, find_node, sandbox_problem

TESTS = "import * as assert from 'assert';\nassert.equal(f(2), 4);\n"
PREFIX = "/** Doubles. */\nconst f = (n: number): number => {\n"


def needs_sandbox(test: Callable[..., None]) -> Callable[..., None]:
    lacking = pytest.mark.skipif(sandbox_problem() is not None, reason=str(sandbox_problem()))
    marked: Callable[..., None] = pytest.mark.extra("node")(lacking(test))
    return marked


def _kinds(
    *predictions: str, prefix: str = PREFIX, tests: str = TESTS, cpu_s: int = 5
) -> list[str]:
    # Node's startup uses part of the CPU time, more on a slow machine.
    limits = {"limits": SandboxLimits(cpu_s=cpu_s, wall_s=120)}
    judgments = score(TypeScriptTests, predictions, attributes=limits, prefix=prefix, tests=tests)
    return [judgment.kind for judgment in judgments]


@needs_sandbox
def test_kinds() -> None:
    whole = PREFIX + "  return n * 2;\n};"
    expected = {
        "  return n * 2;\n};": "correct",
        "Here it is:\n```typescript\n  return n + n;\n}\n```": "correct",
        whole: "correct",
        "function f(n: number): number { return 2 * n; }": "correct",
        "enum E { Two = 2 }\nconst f = (n: number) => n * E.Two;": "correct",
        "import { Heap } from 'heap-js';\nconst f = (n: number) => n * 2;": "correct",
        "import {\n  A,\n  B\n} from 'nope';\nconst f = (n: number) => n * 2;": "correct",
        "import assert from 'assert';\nconst f = (n: number) => n * 2;": "correct",
        "import { Heap } from 'heap-js';\nconst f = (n: number) => new Heap(n);": "raised",
        "  return n;\n};": "failed_tests",
        "  throw new Error('x');\n};": "raised",
        "  return n *": "did_not_parse",
        "  return 4; };\nprocess.exit(0);": "ended_early",
        "  return 4; };\nsetTimeout(() => { throw 1; });": "raised",
        "  return 4; };\n/*": "did_not_parse",
        " \n": "empty",
    }
    assert dict(zip(expected, _kinds(*expected), strict=True)) == expected
    assert _kinds("  for (;;) {}\n};", cpu_s=2) == ["timed_out"]


@needs_sandbox
def test_a_prediction_cannot_swallow_tests_that_would_close_what_it_opens() -> None:
    tests = "/* first */ " + TESTS + "`${1}`; /* last */"
    assert _kinds("return 0; }; /*", "return 0; }; `", tests=tests) == ["did_not_parse"] * 2


@needs_sandbox
def test_asynchronous_tests_are_awaited() -> None:
    right, wrong, never = "return n * 2; };", "return n; };", "return new Promise(() => 0); };"
    kinds = ["correct", "failed_tests", "ended_early"]
    called = "import assert from 'assert';\n(async () => { assert.equal(await f(2), 4); })();\n"
    assert _kinds(right, wrong, never, prefix="const f = (n) => {", tests=called) == kinds
    listed = (
        "import assert from 'assert';\nimport { test } from 'node:test';\n"
        "test('x', async () => { assert.equal(await f(2), 4); });\n"
    )
    assert _kinds(right, wrong, prefix="const f = (n) => {", tests=listed) == kinds[:2]


HONEST = read_blocks("honest.ts")


@needs_sandbox
@pytest.mark.parametrize("name", [name for name in HONEST if not name.endswith("its tests")])
def test_values_cross_between_program_and_tests_as_in_one_process(name: str) -> None:
    tests = f"import * as assert from 'assert';\n{HONEST[f'{name}: its tests']}"
    (judgment,) = score(TypeScriptTests, [HONEST[name]], tests=tests)
    assert judgment == Judgment("correct")


@needs_sandbox
def test_tests_that_do_not_parse_name_their_document() -> None:
    with pytest.raises(EvaluationError, match="document d7: its tests are not TypeScript"):
        _kinds("  return 4; };", tests="assert.equal(")


def test_without_the_tools_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Cleared, as they cache their results.
    for cached in (find_node, sandbox_problem):
        monkeypatch.setattr(typescript_tests, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(typescript_tests.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "was not found (no node on PATH); install" in str(typescript_tests.sandbox_problem())
    with pytest.raises(EvaluationError, match="was not found"):
        _kinds("  return 4; };")


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with closing(Sandbox(find_node().path, SandboxLimits(cpu_s=2, wall_s=120))) as made:
        yield made


def _run(sandbox: Sandbox, script: str) -> Ended:
    with TemporaryFile() as output:
        return sandbox.finish(sandbox.start(["-e", script], (), output), b"", output)


@needs_sandbox
def test_the_root_contains_only_the_program_and_its_libraries(sandbox: Sandbox) -> None:
    ended = _run(sandbox, "console.log(fs.readdirSync('/').sort().join())")
    assert set(ended.output.decode().strip().split(",")) <= {
        *("lib", "lib64", "usr", "nix", "opt", "prlimit", "program", "tmp")
    }
    for path in ("/etc/passwd", "/proc/self/status", "/dev/null", "/home", "/root", "/bin/sh"):
        assert _run(sandbox, f"process.exit(fs.existsSync('{path}') ? 1 : 0)").exit_code == 0


@needs_sandbox
def test_only_a_small_tmp_can_be_written(sandbox: Sandbox) -> None:
    assert b"EROFS" in _run(sandbox, "fs.writeFileSync('/x', '')").output
    fill = "for (let i = 0; ; i++) fs.writeFileSync('/tmp/' + i, 'x'.repeat(9e5))"
    assert b"ENOSPC" in _run(sandbox, fill).output
    assert b"EFBIG" in _run(sandbox, "fs.writeFileSync('/tmp/x', 'x'.repeat(2e6))").output


@needs_sandbox
def test_it_runs_as_an_unprivileged_user(sandbox: Sandbox) -> None:
    seen: list[dict[str, str]] = []

    def look() -> None:
        deadline = time.monotonic() + 120
        while not seen and time.monotonic() < deadline:
            seen.extend(filter(None, map(_status_of_program, Path("/proc").glob("[0-9]*"))))

    watcher = threading.Thread(target=look)
    watcher.start()
    assert _run(sandbox, "for (;;) {}").exit_code == 128 + signal.SIGXCPU
    watcher.join()
    status = seen[0]
    assert "0" not in status["Uid"].split() + status["Gid"].split()
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"


def _status_of_program(folder: Path) -> dict[str, str] | None:
    try:
        if not folder.joinpath("cmdline").read_bytes().startswith(b"/program\0-e\0for"):
            return None
        lines = folder.joinpath("status").read_text().splitlines()
    except OSError:
        return None
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@needs_sandbox
def test_memory_output_and_time_end(sandbox: Sandbox) -> None:
    fill = "const a = []; for (;;) a.push(Buffer.alloc(1e8, 1))"
    assert _run(sandbox, fill).exit_code not in (0, None)
    assert _run(sandbox, "for (;;) console.log('x'.repeat(1e4))").how == "too_much_output"
    with closing(Sandbox(find_node().path, SandboxLimits(wall_s=0.5))) as short:
        assert _run(short, "setTimeout(() => 0, 1e9)").how == "timed_out"
        assert _run(short, "fs.closeSync(1); fs.closeSync(2); for (;;) {}").how == "timed_out"


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    with pytest.raises(EvaluationError, match=r"bwrap is not on PATH.*bubblewrap"):
        Sandbox(Path("/bin/true"), SandboxLimits())
