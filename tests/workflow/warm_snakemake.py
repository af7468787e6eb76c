"""Snakemake from one warm process: each run is a fork of it, in a folder of its own.

Importing Snakemake takes as long as a dry run, and the Snakefile imports the rest in the fork, from
its own folder. For each line ``[folder, arguments, environment]`` on stdin one line
``[code, stdout, stderr]`` comes out.
"""

import atexit
import json
import os
import signal
import sys
import tempfile

from snakemake.cli import main as snakemake

# For what hangs, also on a slow machine.
LIMIT_S = 1200


def run(folder: str, arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as problems:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(problems.fileno(), 2)
            os._exit(run_here(folder, arguments, environment))
        _, status = os.waitpid(pid, 0)
        for stream in (out, problems):
            stream.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), problems.read()


def run_here(folder: str, arguments: list[str], environment: dict[str, str]) -> int:
    signal.alarm(LIMIT_S)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["snakemake", *arguments]
    code: object = 0
    try:
        snakemake(arguments)
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), flush=True)
