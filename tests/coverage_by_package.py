"""Print the share of lines and branches that tests reached, by package.

coverage json -q -o - | python tests/coverage_by_package.py
"""

import json
import sys
from collections import Counter
from pathlib import Path

SCRIPTS = Path("workflow/scripts")


def package_of(file: str) -> str:
    path = Path(file)
    if not path.is_relative_to(SCRIPTS / "expertflow"):
        return "scripts" if path.parent == SCRIPTS else path.parent.name
    parts = path.relative_to(SCRIPTS).parts[:-1]
    return ".".join(parts[:2])


def main() -> None:
    counts: dict[str, Counter[str]] = {}
    for file, found in json.load(sys.stdin)["files"].items():
        for package in (package_of(file), "all"):
            counts.setdefault(package, Counter()).update(found["summary"])
    print(f"{'package':24} {'lines':>8} {'reached':>8} {'branches':>9} {'reached':>8}")
    for package, count in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        lines, branches = count["num_statements"], count["num_branches"]
        print(
            f"{package:24} {lines:8,} {count['covered_lines'] / max(lines, 1):8.1%}"
            f" {branches:9,} {count['covered_branches'] / max(branches, 1):8.1%}"
        )


if __name__ == "__main__":
    main()
