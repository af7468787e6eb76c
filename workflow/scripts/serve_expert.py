#!/usr/bin/env python3
"""Chat with an exported expert in the terminal.

    python workflow/scripts/serve_expert.py results/expert-sql
    python workflow/scripts/serve_expert.py results/expert-sql --prompt "How many singers?"
    python workflow/scripts/serve_expert.py results/expert-sql < question.txt

Standard input is one question. Nothing is downloaded. Decoding follows generation_config.json.
"""

import importlib
import sys
from contextlib import suppress
from pathlib import Path

from expertflow.core import cli
from expertflow.core.errors import ConfigError
from expertflow.core.format import show_hidden


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("folder", type=Path, help="results/{expert}, or a folder with a model")
    parser.add_argument("--prompt", help="answer this and exit")
    parser.add_argument("--system", help="system prompt; default: the one of training")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="longest answer in tokens")
    args = parser.parse_args()
    cli.stop_with_reader()
    # They import torch, which takes seconds: --help and usage errors come first.
    with cli.heavy_imports():
        from transformers.utils import logging

        from expertflow.export.serve import HELP, answer_once, load_expert, run_chat

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    expert = load_expert(args.folder, max_new_tokens=args.max_new_tokens)

    def show(text: str) -> None:
        print(show_hidden(text), end="", flush=True)

    if args.prompt is None and sys.stdin.isatty():
        with suppress(ImportError):  # line editing, where Python was built with it
            importlib.import_module("readline")
        print(f"{expert.name}: {HELP}", file=sys.stderr)
        run_chat(expert, args.system, read=lambda: input("> "), show=show)
    else:
        try:
            text = sys.stdin.read() if args.prompt is None else args.prompt
        except UnicodeDecodeError as error:
            raise ConfigError("the text is not UTF-8; convert it, e.g. with iconv") from error
        answer_once(expert, args.system, text, show)


if __name__ == "__main__":
    cli.run(main)
