"""Shared by all scripts: arguments, one-line errors, and sidecars of outputs."""

import argparse
import gc
import inspect
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec

from expertflow.core.attempts import LOG, record_attempt
from expertflow.core.disk import describe_os_error
from expertflow.core.errors import (
    STOPPED,
    ConfigError,
    ExpertflowError,
    Interrupted,
    TransientError,
    format_error,
    single_line,
)
from expertflow.core.format import show_hidden
from expertflow.core.progress import break_silence, show_activity
from expertflow.core.records import from_json, read_record, write_record
from expertflow.core.sidecars import check_inputs, check_unmoved, write_sidecar

# Torch's errors of CUDA and NCCL, by name since most scripts never import it.
CARD_ERRORS = ("AcceleratorError", "DistBackendError", "OutOfMemoryError")


def run_stage(
    function: Callable[..., Any],
    *,
    takes: Callable[..., Any] | None = None,
    interrupted: str = "run again",
) -> NoReturn:
    """Run a stage's script: its flags are the function's parameters, its output is the result.

    A record is passed as its file, ``spec`` as JSON. A parameter is optional if it has a default or
    may be null. With ``takes``, the flags are that class's fields, and the function gets an
    instance. A function that returns null has written its output itself. Inputs are checked against
    the sidecars next to them, and must not change during the run.
    """
    run(partial(_make_output, function, takes), interrupted=interrupted)


def _make_output(function: Callable[..., Any], takes: Callable[..., Any] | None) -> None:
    args = _parse_stage(takes or function)
    values = {name: getattr(args, name) for name in inspect.signature(takes or function).parameters}
    record = function(**values) if takes is None else function(takes(**values))
    check_unmoved(args.read)
    if record is not None:
        write_record(args.output, record)
        write_sidecar(
            args.output,
            spec=args.spec_text,
            code=args.code,
            files=args.files,
            outside=getattr(record, "files_outside", {}),
        )


def _parse_stage(function: Callable[..., Any]) -> argparse.Namespace:
    """Parse the flags of a stage; ConfigError or DataError if a file or the spec is unreadable."""
    parser = stage_parser(sys.modules["__main__"].__doc__)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    hints, kinds = get_type_hints(function), {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("spec", "code", "output"):
            continue
        kinds[name], is_list, has_default = _kind_of(hints[name])
        is_record = issubclass(kinds[name], msgspec.Struct)
        default = None
        if parameter.default is not parameter.empty:
            has_default, default = True, parameter.default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=Path if is_record else kinds[name],
            required=not has_default,
            nargs=("*" if has_default else "+") if is_list else None,
            default=default,
            help=f"default: {default}" if default else "a record" if is_record else None,
        )
    args = parser.parse_args()
    args.spec_text = args.spec
    try:
        value = json.loads(args.spec)
    except ValueError as error:
        raise ConfigError(f"--spec is not JSON ({error}): {args.spec:.60}") from error
    args.spec = from_json(hints.get("spec", Any), value, where="spec")
    given = (getattr(args, name) for name in kinds)
    files = [one for value in given for one in (value if isinstance(value, list) else [value])]
    paths = [file for file in files if isinstance(file, Path)]
    # Leftovers of the job's earlier attempt are not inputs.
    args.read = check_inputs(paths, made=[args.output, *args.files])
    for name, kind in kinds.items():
        setattr(args, name, _read(kind, getattr(args, name)))
    return args


def _kind_of(hint: Any) -> tuple[type, bool, bool]:
    """Return the type of one value, whether there may be several, and whether it may be null."""
    # list[ShardRecord] -> ShardRecord, True, False; Path | None -> Path, False, True
    inner = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) in (Union, UnionType):
        return (*_kind_of(inner[0])[:2], True)
    if get_origin(hint) in (list, tuple, Sequence):
        return inner[0], True, False
    return hint, False, False


def _read(kind: type, value: Any) -> Any:
    if isinstance(value, list):
        return [_read(kind, item) for item in value]
    is_file = issubclass(kind, msgspec.Struct) and isinstance(value, Path)
    return read_record(kind, value) if is_file else value


def stage_parser(description: str | None, *, by_hand: bool = False) -> argparse.ArgumentParser:
    """Make a stage's argument parser; every stage has a spec and a code digest.

    A script that may run ``by_hand`` needs no spec.
    """
    result = parser(description)
    result.add_argument(
        "--spec", required=not by_hand, default="{}", help="settings of the stage, as JSON"
    )
    result.add_argument("--code", default="", help="digest of the stage's code, stored in sidecars")
    files = "files written besides the record, hashed in the sidecar"
    result.add_argument("--files", type=Path, nargs="*", default=[], help=files)
    return result


def parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


class _WithoutPandas(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(f"{fullname} is not used in this job", name=fullname)


def without_pandas() -> None:
    """Stop pyarrow from importing pandas with its first array: 0.25 s and 50 MB for nothing."""
    # None in sys.modules is not enough: pyarrow's compiled import takes it for the module.
    sys.meta_path.insert(0, _WithoutPandas())


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import torch and its dependents without garbage collection: saves a fifth of the time."""
    handler = signal.getsignal(signal.SIGINT)
    # Ctrl-C ends the process at once: as an exception it can be lost in a callback of the import
    # system, and a training would continue.
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        with show_activity(lambda: "importing torch"):
            yield
    finally:
        # Imported objects stay alive, so later collections can skip them, too.
        gc.freeze()
        gc.enable()
        signal.signal(signal.SIGINT, handler)


def run(
    main: Callable[[], None], *, by_bus: bool = True, interrupted: str = "run again"
) -> NoReturn:
    """Run a script's main function; turn a user's error into one line on stderr and exit code 1.

    ``by_bus``: CUDA numbers GPUs as the driver does, unless the environment says otherwise.
    ``interrupted`` says what to do after a signal; the exit code is then STOPPED.
    """
    if by_bus:
        # By default CUDA orders by speed, and the monitor would watch another GPU. Set before CUDA
        # starts.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    logging.basicConfig(level=logging.INFO, handlers=[printable_handler()])
    if LOG in os.environ:
        # In a log, what is left of a bar would hide the last line.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Only jobs have a log that anyone follows.
    with break_silence() if LOG in os.environ else nullcontext(), record_attempt():
        _run(main, interrupted)


def stop_with_reader() -> None:
    """Exit silently when the reader of the output exits, as ``head`` does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return show_hidden(super().format(record))


def printable_handler() -> logging.Handler:
    """Return a log handler for stderr that makes control characters visible."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(asctime)s %(message)s", "%H:%M:%S"))
    return handler


def _run(main: Callable[[], None], interrupted: str) -> NoReturn:
    try:
        main()
    except Interrupted as interruption:
        logging.warning("%s; %s", interruption, interrupted)
        sys.exit(STOPPED)
    except TransientError as error:
        print(format_error(error), file=sys.stderr)
        sys.exit(1)
    except ExpertflowError as error:
        # Text, not a number, marks an error that a later attempt of the job would hit, too.
        sys.exit(format_error(error))
    except RuntimeError as error:
        if type(error).__name__ not in CARD_ERRORS:
            raise
        traceback.print_exc()
        print(
            f"error: a card failed ({single_line(error, 120)}); see nvidia-smi for other processes"
            " on it and dmesg for Xid errors, and run again or use another card",
            file=sys.stderr,
        )
        sys.exit(1)
    except OSError as error:
        if (line := describe_os_error(error)) is None:
            raise
        sys.exit(format_error(line))
    sys.exit(0)
