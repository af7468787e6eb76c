"""A setting is declared once: schema, flags, documentation and lists follow from it."""

import subprocess
import sys
from typing import Annotated

from support import SCRIPTS

from expertflow.core.records import Record
from expertflow.core.settings import BOTH, LENGTH, SPEED, WEIGHTS, Setting, json_schema, neutralize


class Oven(Record, frozen=True, kw_only=True):
    heat: Annotated[float, Setting("Degrees.", gt=0, le=300, affects=BOTH)] = 180.0
    trays: Annotated[int | None, Setting("Trays.", ge=1, affects=SPEED, auto=True)] = None
    salt: Annotated[float | None, Setting("Grams.", ge=0, affects=WEIGHTS)] = None
    glaze: Annotated[bool, Setting("Shine.", affects=WEIGHTS, neutral=False)] = True
    loaves: Annotated[int, Setting("Number.", ge=1, affects=LENGTH)] = 12
    made_at: str = ""


def test_a_schema_follows_from_the_declaration() -> None:
    assert json_schema(Oven)["properties"] == {
        "heat": {"type": "number", "exclusiveMinimum": 0, "maximum": 300, "default": 180.0,
                 "description": "Degrees."},
        "trays": {"oneOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}],
                  "default": "auto", "description": "Trays."},
        "salt": {"type": ["number", "null"], "minimum": 0, "default": None,
                 "description": "Grams."},
        "glaze": {"type": "boolean", "default": True, "description": "Shine."},
        "loaves": {"type": "integer", "minimum": 1, "default": 12, "description": "Number."},
    }  # fmt: skip


def test_what_changes_no_time_is_neutral() -> None:
    oven = Oven(heat=250.0, trays=4, salt=9.0, loaves=40)
    assert neutralize(oven) == Oven(heat=250.0, trays=4, glaze=False, loaves=40)
    assert neutralize(oven, length=True) == Oven(heat=250.0, trays=4, glaze=False)


def test_generated_files_are_up_to_date() -> None:
    script = SCRIPTS / "write_settings.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
