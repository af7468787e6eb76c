"""Check the results of all demos: every expert really learned, and the numbers are consistent.

    python tests/workflow/check_demos.py [results]

Prints a table and the line for test runners; exits with 1 if an expert did not learn.
"""

import json
import sys
from pathlib import Path

# Share of right answers on held-out questions that a demo must reach; null: only its loss.
# Floors are well below the measured values, because other machines round differently.
FLOORS: dict[str, float | None] = {
    "expert-sql": 0.60, "expert-neo4j": 0.40, "expert-typescript": 0.40, "expert-json": 0.40,
    "repository": None, "phase1c-cot": 0.30, "phase1a": 0.10, "small": None,
}  # fmt: skip


def check(expert: str, report: dict, floor: float | None) -> list[str]:
    before, after = report["evaluation"]["before"], report["evaluation"]["after"]
    faults = []
    if expert != "small" and not after["held_out_loss"] < 0.8 * before["held_out_loss"]:
        faults.append("held-out loss did not fall by a fifth")
    if floor is not None and not after["value_fraction"] >= floor:
        faults.append(f"score {after['value_fraction']:.2f} is below {floor:.2f}")
    epochs = report["training_report"]["training"]["epoch_summaries"]
    if not epochs[-1]["loss_mean"] < epochs[0]["loss_mean"] and len(epochs) > 1:
        faults.append("training loss did not fall")
    return faults


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    failed = 0
    print(f"{'expert':20} {'held-out loss':>17} {'score':>15}  wall s")
    for expert, floor in FLOORS.items():
        report = json.loads((root / expert / "report.json").read_text(encoding="utf-8"))
        sides = [report["evaluation"][side] for side in ("before", "after")]
        losses = " -> ".join(f"{side['held_out_loss']:.3f}" for side in sides)
        values = [side["value_fraction"] for side in sides]
        scores = " -> ".join("-" if value is None else f"{value:.2f}" for value in values)
        faults = check(expert, report, floor)
        failed += bool(faults)
        wall_s = report["time"]["wall_s"]
        print(f"{expert:20} {losses:>17} {scores:>15}  {wall_s:6.0f}  {'; '.join(faults)}")
    print(f"{len(FLOORS) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
