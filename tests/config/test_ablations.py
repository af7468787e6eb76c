"""Lists of variants: those that ship, and those rejected in one line."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from expertflow.config.ablations import ablation_spec
from expertflow.core.errors import ConfigError
from expertflow.studies.records import AblationSpec

ONE = {"name": "one", "label": "One", "training": {"attention": "sdpa"}}


def read(*directories: Path, files: tuple[str, ...] = ("mine",)) -> AblationSpec:
    settings = {"files": list(files), "n_repeats": 3, "max_seconds": 60}
    settings |= {"n_warmup_steps": 5, "n_timed_steps": 20}
    return ablation_spec({"preset": "demo", "ablation": settings}, directories)


def written(folder: Path, value: dict[str, Any], name: str = "mine") -> Path:
    (folder / "ablations").mkdir(exist_ok=True)
    (folder / "ablations" / f"{name}.yaml").write_text(yaml.safe_dump(value))
    return folder


def refused(folder: Path, value: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        read(written(folder, value))
    message = str(error.value)
    assert "mine.yaml" in message and "\n" not in message
    return message


def ladder(*steps: dict[str, Any], **start: Any) -> dict[str, Any]:
    first = {"name": "start", "label": "Start", "rows": "on_the_fly", **start}
    return {"ladder": {"start": first, "steps": list(steps)}}


def test_shipped_lists_are_valid() -> None:
    spec = read(ROOT / "config", files=("from_naive", "switches"))
    rungs = [v for v in spec.variants if v.of == "from_naive"]
    assert [v.rung for v in rungs] == list(range(len(rungs)))
    assert rungs[0].rows == "on_the_fly" and rungs[0].training["batch_size"] == 1
    assert rungs[-1].rows == "packed" and rungs[-1].training == {}
    assert {c.of for c in spec.claims} & {"workers_8", "compile_on", "half_the_saves"}
    # Single-document rows are never compiled here, so their reference must not be either.
    (claim,) = [c for c in spec.claims if c.to == "unpacked"]
    (compared,) = [v for v in spec.variants if v.name == claim.of]
    assert compared.training == {"torch_compile": False}


def test_the_users_own_list_takes_precedence_and_names_are_unique(tmp_path: Path) -> None:
    own, ours = (tmp_path / name for name in ("own", "ours"))
    for folder in (own, ours):
        folder.mkdir()
        written(folder, {"variants": [{**ONE, "label": folder.name}]})
    assert read(own, ours).variants[0].label == "own"
    with pytest.raises(ConfigError, match=r"names 'mime', but .*did you mean 'mine'"):
        read(own, ours, files=("mime",))
    written(own, {"variants": [ONE]}, "other")
    with pytest.raises(ConfigError, match="second variant is named 'one'"):
        read(own, ours, files=("mine", "other"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"training": {"atention": "sdpa"}}, "unknown key 'atention'; did you mean 'attention'"),
        ({"training": {"learning_rate": 1e-3}}, "training: unknown key 'learning_rate'"),
        ({"training": {"attention": "fast"}}, "'attention' is 'fast': it must be one of"),
        ({"training": {"batch_size": "4"}}, "'batch_size' is '4': it must be of type integer"),
        ({"name": "plan"}, "variants.0.name"),
        ({"name": "a/b"}, "variants.0.name"),
        ({"rows": "loose"}, "it must be one of"),
    ],
)
def test_an_invalid_variant_is_rejected(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(tmp_path, {"variants": [{**ONE, **change}]}))


def test_a_ladder_ends_at_the_plan(tmp_path: Path) -> None:
    step = {"name": "s", "label": "S", "as_planned": ["attention"]}
    start = {"training": {"attention": "sdpa", "optim": "adamw_torch"}}
    assert "leaves optim, rows as at the start" in refused(tmp_path, ladder(step, **start))
    packed = {"name": "p", "label": "P", "rows": "packed"}
    assert "leaves optim as" in refused(tmp_path, ladder(step, packed, **start))


def test_an_invalid_claim_is_rejected(tmp_path: Path) -> None:
    claim = {"claim": "c", "by": "b", "said": "s", "of": "one", "to": "two"}
    two = {**ONE, "name": "two"}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"to": "tow"}, "names 'tow', which is not a variant; did you mean 'two'"),
        ({"low": 2.0, "high": 1.5}, "has low 2 above high 1.5"),
        ({"unmeasured": "u"}, "exactly one of: with of and to; with unmeasured"),
    ]
    for change, said in changes:
        assert said in refused(tmp_path, {"variants": [ONE, two], "claims": [{**claim, **change}]})
