"""datatrove: ``JsonlReader`` and ``DocumentTokenizer``, one task per core; tokens, not yet packed.

A reader's tasks divide the files, so the corpus is first copied into one file per task. Documents
are not shuffled, which would write the tokens twice.
"""

import argparse
import shutil

import program


def write(args: argparse.Namespace) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    parts = args.output / "parts"
    parts.mkdir(parents=True)
    with args.input.open("rb") as stream:
        for number, (start, end) in enumerate(program.byte_ranges(args.input, args.processes)):
            stream.seek(start)
            with (parts / f"{number:05}.jsonl").open("wb") as part:
                while n := min(1 << 20, end - stream.tell()):
                    part.write(stream.read(n))
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(parts)),
            DocumentTokenizer(
                output_folder=str(args.output / "rows"),
                tokenizer_name_or_path=str(args.tokenizer / "tokenizer.json"),
                eos_token=None,
                shuffle_documents=False,
                seed=0,
            ),
        ],
        tasks=args.processes,
        workers=args.processes,
        logging_dir=str(args.output / "logs"),
    ).run()
    shutil.rmtree(parts)


def read(args: argparse.Namespace) -> program.Rows:
    import numpy as np

    for path in sorted((args.output / "rows").glob("*.ds")):
        ids = np.fromfile(path, np.uint32)
        ends = np.fromfile(path.with_name(path.name + ".index"), np.uint64)
        yield from np.split(ids, ends[:-1].astype(np.int64))


if __name__ == "__main__":
    program.run(__doc__, write, read)
