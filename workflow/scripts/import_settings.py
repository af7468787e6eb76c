#!/usr/bin/env python3
"""Translate another trainer's settings into an expert manifest.

Reads TRL's and transformers' Trainer arguments, Axolotl, LLaMA-Factory (YAML or JSON) and the
manifests of earlier systems. What has no counterpart is listed with the reason, as comments.
For example:
    import_settings.py qlora.yml --output config/experts/mine.yaml
"""

import sys
from pathlib import Path

from expertflow.config.other_trainers import translate, write_manifest
from expertflow.core import cli
from expertflow.core.errors import ConfigError
from expertflow.core.files import write_text


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("file", type=Path, help="settings of another trainer, YAML or JSON")
    parser.add_argument("--output", type=Path, help="manifest to write; default: print it")
    args = parser.parse_args()
    result = translate(args.file)
    text = write_manifest(result)
    if args.output is None:
        print(text, end="")
        return
    if args.output.exists():
        raise ConfigError(f"{args.output}: already exists; remove it, or choose another file")
    write_text(args.output, text)
    n_explained, n_unknown = len(result.explained), len(result.unknown)
    print(
        f"{len(result.keys) - n_explained - n_unknown} keys mapped,"
        f" {n_explained} left out with a reason, {n_unknown} unknown: {args.output}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    cli.run(main)
