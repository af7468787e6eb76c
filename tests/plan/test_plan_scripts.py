"""The tools to read a plan and to check a claim by hand."""

from pathlib import Path

from plan_fixtures import card, plan
from support import run_script

from expertflow.core.records import write_record


def test_a_claim_is_checked_by_hand() -> None:
    rates = ("--steps", "3558", "--steps-per-second", "1.25", "--tokens-per-step", "12288")
    wrong = run_script("check_claims", *rates, "--hours", "47", "--usd-per-hour", "2.49")
    assert wrong.returncode == 1
    assert "are 47 minutes, about $1.97 at $2.49 an hour, not 47 hours" in wrong.stdout
    right = run_script("check_claims", *rates, "--hours", "0.8")
    assert (right.returncode, right.stderr) == (0, "")
    alone = run_script("check_claims", "--hours", "47")
    assert alone.returncode == 2 and "give at least two" in alone.stderr


def test_a_plan_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_record(path, plan(card("H100 SXM"), price_usd_per_hour=2.49))
    done = run_script("show_plan", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan\n  e on 1 x H100 SXM: lora, bf16\n")
