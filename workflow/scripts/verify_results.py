#!/usr/bin/env python3
"""Check results against their sidecars: whole or changed, made by this code or by another.

Works on copied results without Snakemake's own bookkeeping. Exits 1 if a record was changed.
"""

import argparse
import json
import sys
from pathlib import Path

from expertflow.config.digest import code_digest
from expertflow.config.house import code_extras
from expertflow.core import cli
from expertflow.core.files import sha256_file

SCRIPTS = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=Path("results"))
    changed = 0
    for sidecar in sorted(parser.parse_args().results.rglob(".*.fingerprint")):
        made = json.loads(sidecar.read_text(encoding="utf-8"))
        output = sidecar.with_name(made["output"])
        script = SCRIPTS / f"{made['rule']}.py"
        if not output.is_file():
            verdict = "missing"
        elif sha256_file(output) != made["sha256"]:
            verdict, changed = "CHANGED since it was written", changed + 1
        elif code_digest(script, extra=code_extras(script)) != made["code"]:
            verdict = "whole; made by other code"
        else:
            verdict = "whole"
        print(f"{output}: {verdict}")
    sys.exit(int(changed > 0))


if __name__ == "__main__":
    cli.run(main)
