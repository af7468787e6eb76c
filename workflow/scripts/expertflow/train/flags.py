"""The trainer's command line: every hyperparameter as a flag, for manual runs."""

import argparse
import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from expertflow.core import cli
from expertflow.core.errors import ConfigError
from expertflow.core.settings import SettingInfo
from expertflow.core.sidecars import check_inputs
from expertflow.plan.override import Changes, flags

RECORDS = ("plan", "packing", "model", "staging")
PROBLEMS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
}


def trainer_parser(description: str | None) -> argparse.ArgumentParser:
    parser = cli.stage_parser(description, by_hand=True)
    parser.add_argument("--results", type=Path, help="an expert's results folder, with the records")
    for name in RECORDS:
        parser.add_argument(f"--{name}", type=Path, help=f"{name}.json; default: in --results")
    parser.add_argument("--output", type=Path, help="training.json to write")
    parser.add_argument("--state", type=Path, help="what a later run resumes from; default: state/")
    parser.add_argument("--checkpoint", type=Path, help="model to publish; default: checkpoint/")
    by_hand = parser.add_argument_group("by hand, to train without packed rows")
    by_hand.add_argument("--shards", type=Path, nargs="+", help="records of the documents' shards")
    by_hand.add_argument("--keep", type=Path, help="keep-list")
    group = parser.add_argument_group("hyperparameters, which override the plan's")
    for name, setting in flags().items():
        _add_flag(group, name, setting)
    return parser


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if (args.shards is None) != (args.keep is None):
        parser.error("--shards and --keep go together")
    for name in RECORDS:
        if getattr(args, name) is None:
            if args.results is None:
                parser.error(f"--{name} is missing; pass it, or --results DIR with the records")
            setattr(args, name, args.results / f"{name}.json")
    if args.output is None:
        parser.error("--output is missing; pass the training.json to write")
    args.state = args.state or args.output.parent / "state"
    args.checkpoint = args.checkpoint or args.output.parent / "checkpoint"
    given = [getattr(args, name) for name in RECORDS] + [*(args.shards or []), args.keep]
    check_inputs(filter(None, given), made=[args.output, *args.files])
    return args


def changes_of(args: argparse.Namespace) -> Changes:
    """Return hyperparameters set on the command line; reject values no manifest may have."""
    settings = flags()
    given = {name: getattr(args, name) for name in settings if getattr(args, name) is not None}
    if not given:
        return {}
    # Imported here, since a run without such changes does not need it.
    import jsonschema

    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{flag} {value}: must be a finite number")
        validator = jsonschema.Draft202012Validator(settings[name].plain_schema)
        for error in validator.iter_errors(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            words = PROBLEMS.get(error.validator)
            problem = f"{words} {error.validator_value}" if words else error.message
            raise ConfigError(f"{flag} {shown}: must be {problem}")
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}


def _add_flag(group: Any, name: str, setting: SettingInfo) -> None:
    kind = setting.kind
    # argparse formats help texts with %.
    how: dict[str, object] = {"help": setting.text.replace("%", "%%")}
    if kind is bool:
        how |= {"action": argparse.BooleanOptionalAction, "default": None}
    elif get_origin(kind) is Literal:
        how["choices"] = get_args(kind)
    elif get_args(kind):
        how |= {"nargs": "+", "type": get_args(kind)[0]}
    else:
        how["type"] = kind
    group.add_argument(f"--{name.replace('_', '-')}", **how)
