"""Rows from plain files, made on the command line without an expert."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import SCRIPTS, run_script, running_in, wait_for
from warm_python import warm_jobs
from workflow_space import LIMIT_S

from expertflow.tokens.tokenizer import save_tokenizer, train_tokenizer

pytestmark = [pytest.mark.chain, pytest.mark.long]
N_RECORDS = 82


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a place") / "of mine"
    (folder / "tokenizer").mkdir(parents=True)
    save_tokenizer(train_tokenizer(["what is two"] * 3, vocab_size=300), folder / "tokenizer")
    records = [{"question": f"what is {i} plus 1", "answer": f"{i + 1}"} for i in range(N_RECORDS)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def pretokenize(place: Path, *arguments: str) -> tuple[int, str, str]:
    given = ["--input", "*.jsonl", "--tokenizer", "tokenizer", "--output", "rows", "--cores", "2"]
    environment = os.environ | warm_jobs()
    done = run_script("pretokenize_files", *given, *arguments, cwd=place, env=environment)
    return done.returncode, done.stdout, done.stderr


def test_a_failure_is_one_line_and_leaves_what_was_rejected(place: Path) -> None:
    before, kept = sorted(place.iterdir()), place / "rows.rejected"
    kept.mkdir()
    (kept / "007.rejected.jsonl").write_text("of an earlier run")
    (kept / "mine.txt").write_text("of the user")
    code, _, problem = pretokenize(place, "--text", "{body}")
    assert code == 1
    every = f"{N_RECORDS} of {N_RECORDS} records rejected: missing_field {N_RECORDS}"
    assert problem.startswith(f"error: source files: {every}")
    assert problem.count("\n") == 1
    assert "results/rows" not in problem
    assert problem.endswith("; the rejected records are in rows.rejected\n")
    assert len((kept / "000.rejected.jsonl").read_text().splitlines()) == N_RECORDS
    assert sorted(path.name for path in kept.iterdir()) == ["000.rejected.jsonl", "mine.txt"]
    shutil.rmtree(kept)
    assert sorted(place.iterdir()) == before
    (place / "one.txt").write_text('{"question": "what is one"}\n')
    code, _, problem = pretokenize(place, "--input", "one.txt", "--text", "{text}")
    (place / "one.txt").unlink()
    assert code == 1 and "too few documents to hold one out" in problem
    assert "results/" not in problem and problem.endswith("add records, check for repeats\n")
    for given, reason in {
        ("--length", "4"): "key 'training.max_seq_length' is 4",
        ("--text", "{a"): "source files, text: template '{a': expected '}'",
    }.items():
        code, _, problem = pretokenize(place, *given)
        assert code == 1 and problem.startswith(f"error: {reason}")
    code, _, problem = pretokenize(place, "--cores", "0")
    assert code == 2 and "--cores must be at least 1" in problem
    code, _, problem = pretokenize(place, "--prompt", "{question}")
    assert code == 2
    assert "pass --prompt and --completion, or --text, or --messages" in problem


def test_a_signal_to_stop_leaves_nothing(place: Path) -> None:
    before = sorted(place.iterdir())
    given = ["--input", "*.jsonl", "--tokenizer", "tokenizer", "--output", "stopped"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "pretokenize_files.py"), *given, "--text", "{question}"],
        cwd=place,
    )
    wait_for(lambda: list(place.glob(".stopped.*/stopped/.snakemake")), during=process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert sorted(place.iterdir()) == before
    # Killed processes need a moment to disappear.
    wait_for(lambda: not running_in(place))


def test_rows_are_complete_and_never_overwrite_a_folder(place: Path) -> None:
    from datasets import load_from_disk

    templates = ("--prompt", "{question}", "--completion", "{answer}")
    code, output, problem = pretokenize(place, *templates, "--length", "64")
    assert code == 0, problem
    packing = json.loads((place / "rows" / "packing.json").read_text())
    assert packing["train"]["n_documents"] + packing["held_out"]["n_documents"] == N_RECORDS
    table = load_from_disk(str(place / "rows" / "train"))
    assert len(table) == packing["train"]["n_sequences"]
    assert len(table[0]["input_ids"]) == packing["sequence_length_tokens"] == 64
    assert f"{packing['train']['n_tokens']:,} tokens" in output
    code, _, problem = pretokenize(place, *templates)
    assert (code, problem.count("\n")) == (1, 1)
    assert "rows already exists; choose another folder" in problem
