"""The trainer's flags take what a manifest may say, and nothing else."""

from typing import Any

import pytest

from expertflow.core.errors import ConfigError
from expertflow.train.flags import changes_of, trainer_parser


def changes(*arguments: str) -> dict[str, Any]:
    return changes_of(trainer_parser("a test").parse_args(["--code", "c", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning-rate=-0.001"], "--learning-rate -0.001: must be above 0"),
        (["--learning-rate=nan"], "--learning-rate nan: must be a finite number"),
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--logging-steps", "0"], "--logging-steps 0: must be at least 1"),
        (["--warmup-steps-min=-3"], "--warmup-steps-min -3: must be at least 0"),
        (["--lr-decay-ratio", "0"], "--lr-decay-ratio 0: must be above 0"),
        (["--max-loss", "0"], "--max-loss 0: must be above 0"),
        (["--label-smoothing-factor", "3"], "--label-smoothing-factor 3: must be below 1"),
        (["--lora-dropout", "1"], "--lora-dropout 1: must be below 1"),
        (["--seed=-1", "--batch-size", "4"], "--seed -1: must be at least 0"),
    ],
)
def test_a_value_that_no_manifest_may_have_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changes(*arguments)
    assert str(caught.value) == message


def test_values_that_a_manifest_may_have_are_given_on() -> None:
    wanted = {
        "batch_size": 4, "learning_rate": 3e-6, "lora_targets": ("q_proj", "v_proj"),
        "max_loss": 9.0, "patience": 2, "bf16": True, "torch_compile": False,
        "warmup_ratio": 0.0, "attention": "sdpa", "dataloader_num_workers": 0,
    }  # fmt: skip
    given = changes(
        *("--batch-size", "4", "--learning-rate", "3e-6", "--lora-targets", "q_proj", "v_proj"),
        *("--max-loss", "9", "--patience", "2", "--bf16", "--no-torch-compile"),
        *("--warmup-ratio", "0", "--attention", "sdpa", "--dataloader-num-workers", "0"),
    )
    assert given == wanted
