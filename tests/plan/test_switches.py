"""Which loader a run gets, in which order it reads, and what the plan says of it."""

from typing import Any

import pytest
from support import plan_spec

from expertflow.plan.switches import choose_grouping, choose_loader


def chosen(packing: str, **changes: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings and the reason of each."""
    made = choose_loader(plan_spec(**changes), packing)
    return {name: value for name, (value, _) in made.items()}, {
        name: because for name, (_, because) in made.items()
    }


@pytest.mark.parametrize(
    ("loader", "packing", "n_workers", "expected"),
    [
        (None, "bfd", 0, ("thread", 0)),
        (None, "bfd", 8, ("thread", 0)),
        (None, "concat", 8, ("thread", 0)),
        (None, "none", 0, ("thread", 0)),
        (None, "none", 8, ("workers", 8)),
        ("thread", "none", 8, ("thread", 0)),
        ("workers", "bfd", 8, ("workers", 8)),
        ("workers", "bfd", 0, ("workers", 0)),
    ],
)
def test_workers_load_unpacked_rows_or_what_they_are_told_to(
    loader: str | None, packing: str, n_workers: int, expected: tuple[str, int]
) -> None:
    plan, _ = chosen(packing, loader=loader, dataloader_num_workers=n_workers)
    assert (plan["loader"], plan["dataloader_num_workers"]) == expected


def test_the_reasons_name_what_is_not_used() -> None:
    asked = {
        "dataloader_num_workers": 8,
        "dataloader_prefetch_factor": 4,
        "dataloader_persistent_workers": True,
    }
    plan, reasons = chosen("bfd", **asked)
    assert plan["dataloader_prefetch_factor"] == 4
    assert not plan["dataloader_persistent_workers"]
    assert reasons["loader"].startswith("one thread: packed rows need no worker processes")
    assert reasons["dataloader_num_workers"].endswith("dataloader_num_workers 8 is not used")
    assert "no worker processes to keep" in reasons["dataloader_persistent_workers"]
    plan, reasons = chosen("none", **asked)
    assert plan == {"loader": "workers", **asked}
    assert reasons["loader"] == "unpacked rows, and dataloader_num_workers is 8"


@pytest.mark.parametrize(
    ("packing", "wanted", "expected", "because"),
    [
        ("bfd", True, False, "packing bfd: rows are all of one length"),
        ("none", True, True, "group_by_length of the manifest"),
        ("none", False, False, "group_by_length of the manifest"),
    ],
)
def test_rows_are_grouped_where_they_differ_in_length(
    packing: str, wanted: bool, expected: bool, because: str
) -> None:
    assert choose_grouping(plan_spec(group_by_length=wanted), packing) == (expected, because)
