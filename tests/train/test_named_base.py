"""How a saved adapter names the model that it belongs to."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from expertflow.train.model.load import ADAPTER_FILE, name_base
from expertflow.train.records import ModelRecord


@pytest.mark.parametrize(
    ("kind", "named"), [("hub", ("maker/model", "abc")), ("local", ("results/e/base_model", None))]
)
def test_an_adapter_names_a_hub_model_by_its_id(
    tmp_path: Path, kind: str, named: tuple[str, str | None]
) -> None:
    saved = {"base_model_name_or_path": "results/e/base_model", "r": 8, "revision": None}
    (tmp_path / ADAPTER_FILE).write_text(json.dumps(saved))
    model: Any = SimpleNamespace(kind=kind, name="maker/model", revision="abc")
    name_base(tmp_path, cast(ModelRecord, model))
    value = json.loads((tmp_path / ADAPTER_FILE).read_text())
    assert (value["base_model_name_or_path"], value["revision"]) == named
    assert value["r"] == 8


def test_whole_models_have_no_base_to_name(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(kind="hub", name="maker/model", revision="abc")
    name_base(tmp_path, cast(ModelRecord, model))
    assert not list(tmp_path.iterdir())
