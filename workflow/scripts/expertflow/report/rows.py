"""Hold the tokens of a run against the packed rows that it was to see."""

from typing import Any

Report = dict[str, Any]


def steps_per_epoch(report: Report) -> int:
    """Give the steps that take every packed row once."""
    batch = report["training_parameters"]["global_batch_sequences"]
    return max(1, -(-int(report["data"]["sequences"]) // int(batch)))


def why_rows_differ(report: Report) -> str | None:
    """Say why the run's epochs are not passes over the packed rows; null where they are.

    A run by hand may have its own batch, or documents that are tokenised as they are needed.
    """
    training = report["training_report"]["training"]
    if training["on_the_fly"]:
        return (
            "the run tokenised its documents on the fly: its rows are not the packed ones; its"
            " tokens were not held against packing.json"
        )
    planned = steps_per_epoch(report)
    if abs(training["steps"] / planned - training["epochs"]) <= 1e-6:
        return None
    return (
        f"{training['steps']:,} steps are {training['epochs']:.4g} epochs of this run and"
        f" {training['steps'] / planned:.4g} of the packed rows: it had settings of its own;"
        " its tokens were not held against packing.json"
    )
