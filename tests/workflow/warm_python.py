"""Programs ``python`` and ``snakemake`` that fork one process with the slow imports done.

Importing torch and transformers takes longer than most jobs of tests, importing Snakemake as long
as a dry run. The programs, written to the given folder, run a script in a fork, forward signals,
and exit like the fork. The fork imports the workflow's own code.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# A path with a space cannot follow #!.
PROGRAM = f"""#!/bin/sh
'''exec' {shlex.quote(sys.executable)} -IS "$0" "$@"
' '''
import json, os, signal, socket, sys
# What Hugging Face's libraries are told by the environment, they read when imported.
if sys.argv[1].startswith("-") or any(name.startswith("HF_") for name in os.environ):
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
link = socket.socket(socket.AF_UNIX)
link.connect(os.path.join(os.path.dirname(__file__), "socket"))
given = json.dumps([os.getcwd(), sys.argv[1:], dict(os.environ)]).encode()
socket.send_fds(link, [given + b"\\n"], [0, 1, 2])
told = link.makefile()
pid = int(told.readline())
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(told.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def serve(folder: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    snakemake = shlex.quote(str(Path(sys.executable).with_name("snakemake")))
    texts = {
        "python": PROGRAM,
        "snakemake": f'#!/bin/sh\nexec "${{0%/*}}/python" {snakemake} "$@"\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    gc.freeze()  # or each fork's collections would copy all pages
    print("ready", flush=True)
    children = set[int]()
    while True:
        link, _ = listener.accept()
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        pid = os.fork()
        if pid == 0:
            listener.close()
            attend(link)
        children.add(pid)
        link.close()


def attend(link: socket.socket) -> None:
    """Run a program's request in a fork; kill the fork if the program is killed."""
    given, files, _, _ = socket.recv_fds(link, 1 << 20, 3)
    while not given.endswith(b"\n"):
        given += link.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        link.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os._exit(run(*json.loads(given)))
    ended = os.pidfd_open(pid)
    link.sendall(f"{pid}\n".encode())
    if ended not in select.select([ended, link], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    link.sendall(f"{code}\n".encode())
    os._exit(0)


def run(folder: str, words: list[str], environment: dict[str, str]) -> int:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "COVERAGE_PROCESS_CONFIG" in environment:
        import coverage

        coverage.process_startup()
    sys.argv = words
    sys.path[:1] = [str(Path(words[0]).parent), *environment.get("PYTHONPATH", "").split(":")]
    code: object = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def unmeasured() -> dict[str, str]:
    """Return an environment without coverage: tracing copies takes time and counts nothing."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}


@functools.cache
def warm_python() -> Path:
    """Start the process whose forks are runs and jobs; return the folder of its programs."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder)
    command = [sys.executable, __file__, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=unmeasured())
    atexit.register(process.kill)
    assert process.stdout and process.stdout.readline()
    # A job's shell reads this; the Snakefile puts its own interpreter first.
    (folder / "bash_env").write_text(f"PATH={folder}:$PATH\n")
    return folder


def warm_jobs() -> dict[str, str]:
    """Return an environment in which Snakemake's jobs are forks of the warm process."""
    return {"BASH_ENV": str(warm_python() / "bash_env")}


if __name__ == "__main__":
    import altair  # noqa: F401
    import msgspec  # noqa: F401
    import orjson  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow.dataset  # noqa: F401
    import snakemake.cli  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import vl_convert  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")  # kept, as for other models
    serve(Path(sys.argv[1]))
