#!/usr/bin/env python3
"""Check results against their sidecars: complete or changed, made by this code or other code.

Works on copied results without Snakemake's own records. Exits 1 if a record was changed.
"""

import json
import sys
from pathlib import Path

from expertflow.config.code_digest import rule_digest
from expertflow.core import cli
from expertflow.core.files import sha256_file


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=Path("results"))
    changed = 0
    for sidecar in sorted(parser.parse_args().results.rglob(".*.fingerprint")):
        output = sidecar.with_name(sidecar.name[1:].removesuffix(".fingerprint"))
        try:
            made = json.loads(sidecar.read_bytes())
        except ValueError:
            print(f"{output}: its sidecar is SPOILT: cut short or empty")
            changed += 1
            continue
        if not output.is_file():
            verdict = "missing"
        elif sha256_file(output) != made["sha256"]:
            verdict, changed = "CHANGED since it was written", changed + 1
        elif rule_digest(made["rule"]) != made["code"]:
            verdict = "whole; made by other code"
        else:
            verdict = "whole"
        print(f"{output}: {verdict}")
    sys.exit(int(changed > 0))


if __name__ == "__main__":
    cli.run(main)
