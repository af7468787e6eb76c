"""The sandbox itself, without the help of Node's permissions: what a program inside sees and is."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from expertflow.core.errors import EvaluationError
from expertflow.evaluate.isolation import sandbox as sandbox_module
from expertflow.evaluate.isolation.sandbox import Ended, Sandbox, SandboxLimits
from expertflow.evaluate.tasks.typescript_tests import find_node, sandbox_problem

pytestmark = pytest.mark.skipif(sandbox_problem() is not None, reason=str(sandbox_problem()))


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with closing(Sandbox(find_node().path, SandboxLimits(cpu_s=2, wall_s=120))) as made:
        yield made


def _run(sandbox: Sandbox, script: str) -> Ended:
    return sandbox.run(["-e", script], b"")


def test_the_root_holds_the_program_and_its_libraries_only(sandbox: Sandbox) -> None:
    ended = _run(sandbox, "console.log(fs.readdirSync('/').sort().join())")
    assert set(ended.output.decode().strip().split(",")) <= {
        *("lib", "lib64", "usr", "nix", "opt", "prlimit", "program", "tmp")
    }
    for path in ("/etc/passwd", "/proc/self/status", "/dev/null", "/home", "/root", "/bin/sh"):
        assert _run(sandbox, f"process.exit(fs.existsSync('{path}') ? 1 : 0)").exit_code == 0


def test_only_a_small_tmp_can_be_written(sandbox: Sandbox) -> None:
    assert b"EROFS" in _run(sandbox, "fs.writeFileSync('/x', '')").output
    fill = "for (let i = 0; ; i++) fs.writeFileSync('/tmp/' + i, 'x'.repeat(9e5))"
    assert b"ENOSPC" in _run(sandbox, fill).output
    assert b"EFBIG" in _run(sandbox, "fs.writeFileSync('/tmp/x', 'x'.repeat(2e6))").output


def test_it_runs_as_a_user_without_rights(sandbox: Sandbox) -> None:
    seen: list[dict[str, str]] = []

    def look() -> None:
        deadline = time.monotonic() + 120
        while not seen and time.monotonic() < deadline:
            seen.extend(filter(None, map(_status_of_program, Path("/proc").glob("[0-9]*"))))

    watcher = threading.Thread(target=look)
    watcher.start()
    _run(sandbox, "for (;;) {}")
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


def test_processes_end_with_the_first(sandbox: Sandbox) -> None:
    bomb = (
        "const c = require('child_process'); let n = 0;"
        "for (let i = 0; i < 5; i++) { const p = c.spawn(process.execPath, ['-e', 'for(;;){}'],"
        " {detached: true, stdio: 'ignore'}); p.on('error', () => 0); p.unref(); }"
        "process.exit(7)"
    )
    assert _run(sandbox, bomb).exit_code is not None


def test_memory_output_and_time_end(sandbox: Sandbox) -> None:
    fill = "const a = []; for (;;) a.push(Buffer.alloc(1e8, 1))"
    assert _run(sandbox, fill).exit_code not in (0, None)
    assert _run(sandbox, "for (;;) console.log('x'.repeat(1e4))").how == "too_much_output"
    assert _run(sandbox, "for (;;) {}").exit_code == 128 + 24
    with closing(Sandbox(find_node().path, SandboxLimits(wall_s=0.5))) as short:
        assert _run(short, "setTimeout(() => 0, 1e9)").how == "timed_out"
        assert _run(short, "fs.closeSync(1); fs.closeSync(2); for (;;) {}").how == "timed_out"


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    with pytest.raises(EvaluationError, match=r"bwrap is not on PATH.*bubblewrap"):
        Sandbox(Path("/bin/true"), SandboxLimits())


def test_a_program_that_only_root_reaches_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "node"
    program.write_bytes(b"")
    monkeypatch.setattr(sandbox_module, "_is_root", lambda: True)
    monkeypatch.setattr(sandbox_module, "_libraries", lambda path: set())
    tmp_path.chmod(0o700)
    with closing(Sandbox(program, SandboxLimits())) as made:
        copy = made._scratch
        assert copy is not None and copy.joinpath("node").is_file()
    assert not copy.exists()
