"""Made-up inputs of a model card, and helpers to read its parts."""

import re
import sys
from typing import Any

import yaml
from msgspec.structs import replace
from support import ROOT

from expertflow.evaluate.records import Decoding
from expertflow.export.card import CardInputs, model_card
from expertflow.export.merge import MergeComparison
from expertflow.export.records import ExportSpec

# Cards use the made-up run of the report's tests.
sys.path.insert(0, str(ROOT / "tests" / "report"))
from made_up_runs import make_cpu_inputs, make_gpu_inputs

__all__ = ["make_cpu_inputs", "make_gpu_inputs"]

COMPARISON = MergeComparison(
    loss_before=1.25, loss_after=1.2507, n_rows=32, n_targets=1838,
    allowed_loss_difference=0.0033, max_logit_difference=0.12, allowed_logit_difference=2.0,
)  # fmt: skip
HOSTILE = "a|b\n# c <script>x</script> [l](http://e) `d` **e** \\\n---\n| f | g |"


def card_inputs(run: Any, **changes: Any) -> CardInputs:
    spec = ExportSpec(
        expert="expert-sql", description="Writes SQL.", decoding=Decoding(), dtype="auto",
        hub_datasets={},
    )  # fmt: skip
    names = ("datasets", "model", "plan", "training", "monitor", "evaluation")
    records = {name: getattr(run, name) for name in names}
    return CardInputs(**{"spec": spec, "code": "c0de", **records, **changes})


def write_card(inputs: CardInputs, *files: str, **changes: Any) -> str:
    """Write a card of an export with these changes and license files."""
    record = replace(make_gpu_inputs().export, **changes)
    return model_card(inputs, record, COMPARISON, files)


def parts(card: str) -> tuple[dict[str, Any], str]:
    _, front, body = re.split(r"^---\n", card, maxsplit=2, flags=re.MULTILINE)
    return yaml.safe_load(front), body
