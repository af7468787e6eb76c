"""A setting is declared once: schema, flags, documentation and lists follow from it."""

from typing import Annotated, get_args

from support import ROOT

from expertflow.config.settings_files import render_files
from expertflow.core.records import Record
from expertflow.core.settings import (
    BOTH,
    LENGTH,
    PROCESSES,
    SPEED,
    WEIGHTS,
    Affected,
    Setting,
    list_settings,
    neutralize,
)
from expertflow.plan.settings import Training


class Oven(Record, frozen=True, kw_only=True):
    heat: Annotated[float, Setting("Degrees.", affects=BOTH)] = 180.0
    trays: Annotated[int, Setting("Trays.", affects=SPEED)] = 1
    salt: Annotated[float | None, Setting("Grams.", affects=WEIGHTS)] = None
    glaze: Annotated[bool, Setting("Shine.", affects=WEIGHTS, neutral=False)] = True
    loaves: Annotated[int, Setting("Number.", affects=LENGTH)] = 12
    bakers: Annotated[int, Setting("Number.", affects=PROCESSES)] = 1


def test_settings_without_an_effect_on_time_are_neutral() -> None:
    oven = Oven(heat=250.0, trays=4, salt=9.0, loaves=40, bakers=2)
    assert neutralize(oven) == Oven(heat=250.0, trays=4, glaze=False, bakers=2)


def test_every_setting_of_a_training_affects_what_there_is() -> None:
    affected = {one for setting in list_settings(Training) for one in setting.affects}
    assert affected == {*get_args(Affected)}


def test_generated_files_are_up_to_date() -> None:
    for path, text in render_files(ROOT).items():
        assert path.read_text() == text, f"{path}: run workflow/scripts/write_settings.py"
