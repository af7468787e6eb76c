"""The trainer's command line: every hyper-parameter as a flag, for a run by hand."""

import argparse
from pathlib import Path
from typing import Any, get_args

from expertflow.core import cli
from expertflow.plan.override import choices, flags

RECORDS = ("plan", "packing", "model", "staging")


def trainer_parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of the trainer: what the workflow gives, and what a person may."""
    parser = cli.parser(description, by_hand=True)
    parser.add_argument("--results", type=Path, help="an expert's results: where the records are")
    for name in RECORDS:
        parser.add_argument(f"--{name}", type=Path, help=f"{name}.json; default: in --results")
    parser.add_argument("--output", type=Path, help="training.json to write")
    parser.add_argument("--state", type=Path, help="what a later run resumes from; default: state/")
    parser.add_argument("--checkpoint", type=Path, help="model to publish; default: checkpoint/")
    by_hand = parser.add_argument_group("by hand, to go on where the packed rows are missing")
    by_hand.add_argument("--shards", type=Path, nargs="+", help="records of the documents' shards")
    by_hand.add_argument("--keep", type=Path, help="keep-list")
    parser.add_argument(
        "--replay-step", type=int, metavar="N", help="only look at step N of --state again"
    )
    group = parser.add_argument_group("hyper-parameters, instead of those of the plan")
    for name, kind in flags().items():
        _add_flag(group, name, kind)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; fill in where records and results lie."""
    args = parser.parse_args()
    if (args.shards is None) != (args.keep is None):
        parser.error("--shards and --keep go together")
    for name in RECORDS:
        if getattr(args, name) is None:
            if args.results is None:
                parser.error(f"--{name} is missing; give it, or --results DIR with the records")
            setattr(args, name, args.results / f"{name}.json")
    if args.replay_step is not None and args.state is None:
        parser.error("--replay-step needs --state, the state of the run")
    if args.replay_step is None and args.output is None:
        parser.error("--output is missing; give the training.json to write")
    args.output = args.output or args.state / "training.json"
    args.state = args.state or args.output.parent / "state"
    args.checkpoint = args.checkpoint or args.output.parent / "checkpoint"
    return args


def changes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Give the hyper-parameters that were set by hand."""
    given = {name: getattr(args, name) for name in flags()}
    return {name: value for name, value in given.items() if value is not None}


def _add_flag(group: Any, name: str, kind: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
    elif (listed := choices(kind)) is not None:
        group.add_argument(flag, choices=listed)
    elif get_args(kind):
        group.add_argument(flag, nargs="+", type=get_args(kind)[0], action=_AsTuple)
    else:
        group.add_argument(flag, type=kind)


class _AsTuple(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values))
