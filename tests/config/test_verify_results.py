import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT


@pytest.mark.parametrize("spoilt", [b"", bytes(9), b'{"output": "a'])
def test_a_spoilt_sidecar_is_told_of_and_the_rest_is_checked(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / ".a.json.fingerprint").write_bytes(spoilt)
    (tmp_path / ".b.json.fingerprint").write_text('{"output": "b.json"}')
    script = ROOT / "workflow" / "scripts" / "verify_results.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stderr
    assert done.stdout.splitlines() == [
        f"{tmp_path}/a.json: its sidecar is SPOILT: cut short or empty",
        f"{tmp_path}/b.json: missing",
    ]
