#!/usr/bin/env python3
"""Show a plan: every setting with its reason, memory, hours, dollars, other hardware, claims.

For example:
    show_plan.py results/expert-sql
"""

from pathlib import Path

from expertflow.config.load import describe_origins
from expertflow.config.validate import FOLDERS, list_files
from expertflow.core import cli
from expertflow.core.errors import DataError
from expertflow.core.records import read_record
from expertflow.plan.records import TrainPlan
from expertflow.plan.show import plan_text


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("plan", type=Path, nargs="+", help="plan.json of an expert, or its folder")
    shown, manifests = [], list_files(folder / "experts" for folder in FOLDERS)
    for given in parser.parse_args().plan:
        path = given if given.suffix == ".json" else given / "plan.json"
        if not path.is_file():
            raise DataError(f"{path}: there is no plan; correct the path, or run snakemake {path}")
        plan = read_record(TrainPlan, path)
        shown.append(plan_text(plan))
        manifest = manifests.get(plan.expert)
        if manifest is not None and (origins := describe_origins(manifest)):
            shown.append(f"origins that {manifest} states\n{origins}")
    cli.stop_with_reader()
    print("\n\n".join(shown))


if __name__ == "__main__":
    cli.run(main)
