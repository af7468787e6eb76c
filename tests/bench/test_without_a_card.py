"""What a step compiles to for an absent card."""

import json
import subprocess
import sys

import pytest
from support import ROOT

# KB that generated kernels move per token and layer, forward and backward together. Above that,
# an operation writes what it could keep in registers.
CEILINGS_KB = {
    "qwen3-0.6b dora checkpointed": 470,
    "qwen3-0.6b qlora": 280,
    "qwen3-0.6b full": 208,
}


@pytest.mark.long
@pytest.mark.extra("triton")
@pytest.mark.extra("bitsandbytes")
def test_a_step_compiles_completely_and_moves_no_more_bytes_than_before() -> None:
    command = [sys.executable, "bench/without_a_card.py", "--workers", "1", "--cases"]
    done = subprocess.run([*command, *CEILINGS_KB], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert [case["name"] for case in cases] == [*CEILINGS_KB]
    for case in cases:
        assert (case["graph_breaks"], case["graphs"] <= 2) == (0, True), case
        assert 0 < case["kb_per_token_and_layer"] < CEILINGS_KB[case["name"]], case
