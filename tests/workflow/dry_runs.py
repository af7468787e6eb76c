"""Run the Snakefile dry, once for each case on stdin, each in a fork of one process.

A case is ``[manifest, arguments, environment]``; out come the return code and what was said.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from snakemake.cli import main as snakemake


def run(manifest: str, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    Path("config/experts/mine.yaml").write_text(manifest, encoding="utf-8")
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os.environ.update(environment)
            sys.argv = ["snakemake", *arguments]
            try:
                snakemake(arguments)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
                print(end.code if isinstance(end.code, str) else "", file=sys.stderr)
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read().decode()


if __name__ == "__main__":
    print(json.dumps([run(*case) for case in json.load(sys.stdin)]))
