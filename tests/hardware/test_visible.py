import pytest

from expertflow.hardware.visible import HIDDEN, MIG, visible_gpus

UUIDS = ["GPU-aa1", "GPU-aa2", "GPU-b"]


@pytest.mark.parametrize(
    ("setting", "indexes"),
    [
        (None, (0, 1, 2)),
        ("0,2", (0, 2)),
        ("2, 0", (2, 0)),
        ("GPU-b", (2,)),
        ("GPU-aa1,2", (0, 2)),
        # An entry counts as far as it is a number.
        ("1abc,+0", (1, 0)),
        # The list ends at what names no card or could be two.
        ("1,-1,0", (1,)),
        ("0,9,1", (0,)),
        ("0,GPU-a,1", (0,)),
    ],
)
def test_a_setting_names_cards(setting: str | None, indexes: tuple[int, ...]) -> None:
    assert visible_gpus(setting, UUIDS).indexes == indexes


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("", HIDDEN),
        ("-1", HIDDEN),
        ("NoDevFiles", HIDDEN),
        ("1,1,0", HIDDEN),
        ("GPU-b,GPU-b", HIDDEN),
        ("MIG-GPU-aa1/1/0", MIG),
    ],
)
def test_a_setting_may_hide_all(setting: str, reason: str) -> None:
    seen = visible_gpus(setting, UUIDS)
    assert (seen.indexes, seen.reason) == ((), reason)
