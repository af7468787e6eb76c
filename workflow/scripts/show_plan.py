#!/usr/bin/env python3
"""Show a plan: every setting with its reason, memory, hours, dollars, other hardware, claims.

For example:
    show_plan.py results/expert-sql/plan.json
"""

from pathlib import Path

from expertflow.config.stated import stated_text
from expertflow.core import cli
from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.plan.show import plan_text

CONFIG = Path(__file__).parents[2] / "config"


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("plan", type=Path, nargs="+", help="plan.json of an expert")
    args = parser.parse_args()
    print("\n\n".join(_shown(read_record(TrainPlan, path)) for path in args.plan))


def _shown(plan: TrainPlan) -> str:
    """Format a plan, with the origins that its manifest states if the manifest is at hand."""
    shown = [plan_text(plan)]
    for directory in (Path("config", "experts"), CONFIG / "experts"):
        path = next(directory.glob(f"{plan.expert}.*"), None)
        if path is not None:
            stated = stated_text(path)
            shown += [f"origins that {path} states\n{stated}"] if stated else []
            break
    return "\n\n".join(shown)


if __name__ == "__main__":
    cli.run(main)
