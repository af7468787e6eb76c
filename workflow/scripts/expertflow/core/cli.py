"""Shared by all scripts: arguments, one-line errors, and sidecars of outputs."""

import argparse
import errno
import json
import logging
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from expertflow.core.errors import ConfigError, ExpertflowError, Interrupted
from expertflow.core.files import sha256_file, sha256_text, sidecar_of
from expertflow.core.records import from_json, read_record, write_record

T = TypeVar("T")


class Stage(argparse.Namespace):
    """The arguments of a stage's script: its spec, input records, and paths."""

    def pick(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def write(self, record: Any, output: Path | None = None) -> None:
        """Write the stage's record, by default to ``--output``, and its sidecar."""
        write_record(output or self.output, record)
        write_sidecar(output or self.output, spec=self.spec_text, code=self.code)


def stage(description: str | None, spec: Any, /, **flags: Any) -> Stage:
    """Parse the arguments of a stage's script; ConfigError or DataError if a file is unreadable.

    A flag is declared by its record's class (``[cls]``: one or more), the help text of a required
    path, or keywords of ``add_argument``. ``spec`` is the class of the stage's settings.
    """
    parser = stage_parser(description)
    classes = {}
    for name, declared in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(declared, dict):
            parser.add_argument(flag, **declared)
        elif isinstance(declared, str):
            parser.add_argument(flag, type=Path, required=True, help=declared)
        else:
            classes[name] = declared
            many = {"nargs": "+"} if isinstance(declared, list) else {}
            text = f"record{'s' if many else ''} of the {name}"
            parser.add_argument(flag, type=Path, required=True, help=text, **many)
    args = parser.parse_args(namespace=Stage())
    args.spec_text, args.spec = args.spec, spec_from_text(spec, args.spec)
    for name, cls in classes.items():
        named = getattr(args, name)
        if isinstance(cls, list):
            setattr(args, name, [read_record(cls[0], path) for path in named])
        else:
            setattr(args, name, read_record(cls, named))
    return args


def stage_parser(description: str | None, *, by_hand: bool = False) -> argparse.ArgumentParser:
    """Make a stage's argument parser; every stage has a spec and a code digest.

    A script that may run ``by_hand`` needs no spec.
    """
    result = parser(description)
    result.add_argument(
        "--spec", required=not by_hand, default="{}", help="settings of the stage, as JSON"
    )
    result.add_argument("--code", default="", help="digest of the stage's code, kept in sidecars")
    return result


def parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


class _Without(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == self.package:
            raise ModuleNotFoundError(f"{fullname} is not used in this job", name=fullname)


def without_pandas() -> None:
    """Stop pyarrow from importing pandas with its first array: 0.25 s and 50 MB for nothing."""
    sys.meta_path.insert(0, _Without("pandas"))


def spec_from_text(cls: type[T], text: str) -> T:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--spec is not JSON ({error}): {text:.60}") from error
    result: T = from_json(cls, value, where="spec")
    return result


def run(
    main: Callable[[], None], *, by_bus: bool = True, interrupted: str = "run again"
) -> NoReturn:
    """Run a script's main function; turn a user's error into one line on stderr and exit code 1.

    ``by_bus``: CUDA counts GPUs as the driver does, unless the environment says otherwise.
    ``interrupted`` tells what to do after a signal; the exit code is then 143.
    """
    if by_bus:
        # By default CUDA orders by speed, and the monitor would watch another GPU. Set before CUDA
        # starts.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        main()
    except Interrupted as interruption:
        logging.warning("%s; %s", interruption, interrupted)
        sys.exit(143)
    except ExpertflowError as error:
        sys.exit(_one_line(str(error)))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or "the output's file system"
        sys.exit(_one_line(f"{place}: no space left; free some, or move results/ to another disk"))
    sys.exit(0)


def write_sidecar(output: Path, *, spec: str, code: str) -> None:
    """Record beside an output what it was made from, so that a copy can be verified anywhere."""
    sidecar: dict[str, Any] = {
        "rule": Path(sys.argv[0]).stem,
        "output": output.name,
        "sha256": sha256_file(output),
        "spec_sha256": sha256_text(spec),
        "code": code,
    }
    write_record(sidecar_of(output), sidecar)


def _one_line(message: str) -> str:
    return "error: " + " ".join(message.split())
