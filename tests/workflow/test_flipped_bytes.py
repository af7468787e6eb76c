"""One byte flips in a file of each kind: the file is named, with what to do, or remade.

test_remedies.py follows the line's advice.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from support import flip_byte
from workflow_space import Workspace

pytestmark = pytest.mark.chain
INDEX = "results/index.html"
# A call of a stage's script, as a rule writes it.
CALL = re.compile(r'python "\$EXPERTFLOW"/(\w+)\.py .*?(?= 2> )')
FIXES = ("run make repair", "restore it, or accept it: snakemake", ": damaged, ")
# The reader of a file: a stage, or ``snakemake`` for its main process.
READERS = {
    "results/tiny/sources.lock.json": "snakemake",
    "results/tiny/documents/sums/000.arrow": "deduplicate_documents",
    "results/tiny/keep.arrow": "pack_sequences",
    "results/tiny/tokenizer/tokenizer.json": "pretokenize_shard",
    "results/tiny/base_model/model.safetensors": "stage_to_nvme",
    "results/tiny/tokens/sums/.000.json.fingerprint": "pack_sequences",
    "results/tiny/checkpoint/model.safetensors": "generate_answers",
    "results/tiny/merged/README.md": "build_report",
    "state/.tokens/*/tokens.ids": "pretokenize_shard",
}
MADE_AGAIN = {"results/tiny/sources.lock.json", "state/.tokens/*/tokens.ids"}


@pytest.fixture(scope="module")
def copied(finished: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return finished.copy(tmp_path_factory.mktemp("copied") / "space")


@pytest.fixture(scope="module")
def calls(copied: Workspace) -> dict[str, str]:
    """Return the command of each stage in a complete run."""
    output = copied.run("-n", "-p", "-F", "--logger-expertflow-snakemake", INDEX)
    return {match[1]: match[0] for match in CALL.finditer(output) if "results/tiny/" in match[0]}


@pytest.mark.parametrize("pattern", READERS)
def test_no_flipped_byte_is_used(copied: Workspace, calls: dict[str, str], pattern: str) -> None:
    [path] = copied.root.glob(pattern)
    intact = path.read_bytes()
    flip_byte(path)
    flipped = path.read_bytes()
    if READERS[pattern] == "snakemake":
        done = copied.snakemake("-n", INDEX)
    else:
        scripts, call = copied.root / "workflow" / "scripts", calls[READERS[pattern]]
        words = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = copied.execute("bash", "-c", call, EXPERTFLOW=str(scripts), PATH=words)
    code, lines = done.returncode, (done.stdout + done.stderr).splitlines()
    if pattern in MADE_AGAIN:
        assert code == 0 and path.read_bytes() != flipped
        return
    path.write_bytes(intact)
    name = path.relative_to(copied.root).as_posix()
    # A line may name the folder instead.
    expected = re.compile(rf"{name}|{Path(name).parent}( is damaged|: damaged, {path.name} )")
    told = [line for line in lines if expected.search(line) and "$EXPERTFLOW" not in line]
    assert code and any(fix in told[-1] for fix in FIXES), lines
