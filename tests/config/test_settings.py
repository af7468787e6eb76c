"""A setting is declared once: schema, flags, documentation and lists follow from it."""

from typing import Annotated

from msgspec import field
from support import run_script

from expertflow.core.records import Record
from expertflow.core.settings import (
    BOTH,
    LENGTH,
    LOG,
    NOTHING,
    PROCESSES,
    SCHEDULE,
    SPEED,
    WEIGHTS,
    Setting,
    json_schema,
    list_settings,
    neutralize,
)


class Rack(Record, frozen=True):
    width: Annotated[int, Setting("Centimeters.", ge=1, affects=NOTHING)] = 40


class Oven(Record, frozen=True, kw_only=True):
    heat: Annotated[float, Setting("Degrees.", gt=0, le=300, affects=BOTH)] = 180.0
    trays: Annotated[int | None, Setting("Trays.", ge=1, affects=SPEED, auto=True)] = None
    salt: Annotated[float | None, Setting("Grams.", ge=0, affects=WEIGHTS)] = None
    glaze: Annotated[bool, Setting("Shine.", affects=WEIGHTS, neutral=False)] = True
    loaves: Annotated[int, Setting("Number.", ge=1, affects=LENGTH)] = 12
    bakers: Annotated[int, Setting("Number.", ge=1, affects=PROCESSES)] = 1
    yeast: Annotated[str, Setting("Kind.", affects=SCHEDULE)] = "dry"
    diary: Annotated[str, Setting("Place.", affects=LOG)] = "here"
    tags: Annotated[tuple[int, ...], Setting("Tags.", NOTHING, ge=1, min_length=1)] = (1,)
    rack: Annotated[Rack, Setting("Rack.", affects=NOTHING)] = field(default_factory=Rack)
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
        "bakers": {"type": "integer", "minimum": 1, "default": 1, "description": "Number."},
        "yeast": {"type": "string", "default": "dry", "description": "Kind."},
        "diary": {"type": "string", "default": "here", "description": "Place."},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1,
                 "default": [1], "description": "Tags."},
        "rack": {**json_schema(Rack), "default": {}, "description": "Rack."},
    }  # fmt: skip


def test_rooms_ask_what_a_setting_affects() -> None:
    assert {setting.name: set(setting.affects) for setting in list_settings(Oven)} == {
        "heat": {"weights", "speed"}, "trays": {"speed"}, "salt": {"weights"},
        "glaze": {"weights"}, "loaves": {"length"}, "bakers": {"speed", "processes"},
        "yeast": {"schedule"}, "diary": {"weights", "log"}, "rack": set(),
        "tags": set(),
    }  # fmt: skip


def test_what_changes_no_time_is_neutral() -> None:
    oven = Oven(heat=250.0, trays=4, salt=9.0, loaves=40, bakers=2)
    assert neutralize(oven) == Oven(heat=250.0, trays=4, glaze=False, loaves=40, bakers=2)
    assert neutralize(oven, length=True) == Oven(heat=250.0, trays=4, glaze=False, bakers=2)


def test_generated_files_are_up_to_date() -> None:
    done = run_script("write_settings", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
