"""Mistakes of people who bring settings from elsewhere end in one line that says the right name."""

from pathlib import Path
from typing import Any

import pytest
from test_load import SCHEMAS, base, load

from expertflow.config.validate import FORMER_NAMES
from expertflow.core.errors import ConfigError

SOURCE = {"name": "s", "kind": "local", "path": "x.jsonl"}


def below(node: dict[str, Any], path: str) -> bool:
    for part in path.split("."):
        node = node.get("properties", {}).get(part, {})
    return bool(node)


def test_former_names_lead_to_settings_that_exist_and_are_none_themselves() -> None:
    expert, defs = SCHEMAS.expert, SCHEMAS.expert["$defs"]
    places = [defs["training"], defs["source"], expert["properties"]["data"], expert]
    for old, new in FORMER_NAMES.items():
        holders = [place for place in places if below(place, new)]
        assert holders, new
        assert not any(old in place["properties"] for place in holders), old


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"training": {"per_device_train_batch_size": 4}},
            "'training.per_device_train_batch_size'; it is called 'batch_size' here",
        ),
        ({"training": {"lora_r": 4}}, "'training.lora_r'; it is called 'lora.r' here"),
        (
            {"evaluation": {"task": "exact_match", "backend": "vllm"}},
            "'evaluation.backend'; transformers writes the answers; leave it out",
        ),
        ({"training": {"num_workers": 4}}, "it is called 'dataloader_num_workers' here"),
        # An old name means something only where the new one belongs.
        ({"decoding": {"lora_r": 4}}, "'decoding.lora_r'; known keys are stop"),
        (
            {"sources": [{**SOURCE, "prompt": "{q}"}]},
            "'sources.0' has kind, name, path, prompt: it must be exactly one of: with prompt and",
        ),
    ],
)
def test_a_setting_from_elsewhere_is_named_as_it_is_here(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {**base(), **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rate_without_a_dot_is_a_number(tmp_path: Path) -> None:
    expert = load(tmp_path, base(), training={"learning_rate": "3e-6"})
    assert expert["training"]["learning_rate"] == 3e-6
