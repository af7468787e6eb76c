#!/usr/bin/env python3
"""Check the claimed figures of a run for consistency; exit code 1 if they contradict each other.

For example:
    check_claims.py --steps 3558 --steps-per-second 1.25 --hours 47 --usd-per-hour 2.49
"""

import sys
from typing import Any

from expertflow.config.validate import check
from expertflow.core import cli
from expertflow.core.records import from_json
from expertflow.core.settings import json_schema, list_settings
from expertflow.plan.claims import check_claims
from expertflow.plan.records import Claim
from expertflow.plan.show import claim_line


def main() -> None:
    parser = cli.parser(__doc__)
    for claimed in list_settings(Claim):
        name = claimed.name.removeprefix("n_")
        if name.endswith("_per_s"):
            name += "econd"
        more: dict[str, Any] = {"type": claimed.kind}
        if "items" in claimed.plain_schema:
            more = {"type": float, "nargs": "+", "default": []}
        elif "enum" in claimed.plain_schema:
            more = {"choices": claimed.plain_schema["enum"]}
        if claimed.name not in ("text", "hardware"):
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, dest=claimed.name, help=claimed.text, **more)
    figures = {"text": "by hand", **vars(parser.parse_args())}
    check(figures, json_schema(Claim), where="claim")
    checks = check_claims((from_json(Claim, figures, where="claim"),))
    if not checks:
        parser.error("these figures cannot be checked against each other; pass at least two")
    print("\n".join(claim_line(check) for check in checks))
    sys.exit(not all(check.holds for check in checks))


if __name__ == "__main__":
    cli.run(main)
