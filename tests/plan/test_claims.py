"""Claims checked against their own numbers, and our own figures against each other."""

from typing import Any

import plan_fixtures
import pytest
import yaml
from msgspec.structs import replace
from support import ROOT, run_script

from expertflow.core.errors import ConfigError
from expertflow.core.records import from_json
from expertflow.plan.claims import check_claims, parse_duration
from expertflow.plan.records import Claim, ClaimCheck, TrainPlan


def checks(plan: TrainPlan | None = None, **claim: Any) -> list[ClaimCheck]:
    return list(check_claims((Claim(**{"text": "t", **claim}),), plan))


def test_a_progress_bar_shows_minutes() -> None:
    assert parse_duration("46:47") == pytest.approx(2807 / 3600)
    assert parse_duration("1:46:47") == pytest.approx(6407 / 3600)
    done = run_script("check_claims", "--duration", "46:47", "--hours", "47")
    assert done.returncode == 1 and "47 minutes, not 47 hours" in done.stdout
    assert checks(duration="46:47:00", hours=47)[0].holds


def test_impossible_figures_are_rejected_by_name() -> None:
    for text in ("46", "46:99", "99:46", "1:75:00", "1 day", "4:4", "1:2:3:4", "0:00"):
        with pytest.raises(ConfigError, match="neither minutes:seconds nor"):
            parse_duration(text)
    done = run_script("check_claims", "--steps=0", "--usd=-1", "--parts-hours", "1", "-1")
    for problem in ("'n_steps' is 0", "'usd' is -1.0", "'parts_hours.1' is -1.0"):
        assert f"claim: key {problem}: it must be at least" in done.stderr
    alone = run_script("check_claims", "--hours", "47")
    assert alone.returncode == 2 and "pass at least two" in alone.stderr


RATE = {"n_steps": 3558, "steps_per_s": 1.25, "usd_per_hour": 2.49}
PAID = "$1.97 at $2.49 an hour"
HOUR = {"n_steps": 3600, "steps_per_s": 1.0}
TOKENS = {**RATE, "tokens_per_step": 8192.0}
SAVES = {"hours": 38.0, "n_saves": 28, "n_saves_after": 14, "minutes_per_save": 2.0}
DOWN = {"hours_before": 38.0, "hours": 20.0}
TIMES = {"speedups": (2.0, 2.0), "tf32_speedup": 8.0, "speedup": 32.0}
WARM_UP = {"n_steps": 66, "warmup_ratio": 0.1, "warmup_steps_min": 10}


def test_a_claim_against_its_own_figures() -> None:
    for claim, holds, finding in (
        ({**RATE, "hours": 47.0, "usd": 117.0}, False, f"about {PAID}, not 47 hours and $117"),
        ({**RATE, "hours": 47.0}, False, "3,558 steps at 1.25 a second are 47 minutes"),
        ({**HOUR, "hours": 1.05}, True, ""),
        # Dollars without hours are checked against the rate.
        ({**TOKENS, "usd": 117.0}, False, "at $2.49 an hour, not $117"),
        ({**TOKENS, "usd": 1.97}, True, ""),
        # A duration counts as hours.
        ({**HOUR, "duration": "1:00:30"}, True, ""),
        ({**HOUR, "duration": "46:47"}, False, "are 60 minutes, not 46:47"),
        ({"duration": "46:47", "usd_per_hour": 2.49, "usd": 117.0}, False, ""),
        ({"duration": "2:00:00", "parts_hours": (1.0, 2.0)}, False, ""),
        ({"steps_per_s": 1.25}, False, "mean nothing without tokens per step"),
        ({"hours": 47.0, "usd_per_hour": 2.49, "usd": 117.0}, True, ""),
        ({"hours": 47.0, "usd_per_hour": 2.49, "usd": 140.0}, False, ""),
        ({"hours": 6.0, "parts_hours": (1.0, 2.0, 3.0)}, True, ""),
        ({**SAVES, "gain_percent": 1.2}, True, ""),
        ({**DOWN, "gain_percent": 47.0}, True, "38 hours down to 20 hours are 47 %"),
        ({**TIMES, "precision": "fp32"}, True, "the factors (2 x 2 x 8) make 32x"),
        ({**WARM_UP, "n_warmup_steps": 7}, False, "max(10, int(0.1 x 66)) gives 10 steps, not 7"),
    ):
        check = checks(**claim)[0]
        assert check.holds is holds
        assert finding in check.finding


def test_the_sources_arithmetic_is_checked() -> None:
    """The products, ranges and comparisons of C and D, from their shipped manifests."""
    wrong = ""
    for name in ("phase1c-cot", "phase1a"):
        manifest = yaml.safe_load((ROOT / "config" / "experts" / f"{name}.yaml").read_text())
        claims = from_json(tuple[Claim, ...], manifest["claims"], where=name)
        wrong += "".join(check.finding for check in check_claims(claims) if not check.holds)
    for message in (
        "TF32 does nothing for bf16 products: 8x is impossible",
        "the factors (2 x 2) make 4x, not 32x",
        "47 hours down to 5 are 9.4x, not 32x",
        "1.25 steps a second up to 5 are 4x, not 32x",
        "3,558 steps at 5 a second are 12 minutes, not 5 hours",
        "3,558 steps at 3 a second are 20 minutes, not 8 hours",
        "38 hours down to 20 hours are 47 %, not 37-58 %",
        "the parts listed (21) add up to 21 hours, not 14",
        "600,000 documents x 3 / 16 a step are 112,500 steps, not 28,000",
        "with 14 of them the gain is 1.2 %, not 5 % or more",
    ):
        assert message in wrong


@pytest.mark.parametrize("n_cards", [1, 8])
def test_no_card_computes_more_than_its_peak(n_cards: int) -> None:
    made = plan_fixtures.plan(plan_fixtures.card("H100 SXM"))
    # 100,000 tokens a second and card.
    plan = replace(
        made, flops_per_token_model=3e9, predicted_tokens=n_cards * 360_000_000,
        world_size=n_cards, cost=replace(made.cost, step_hours=1.0),
    )  # fmt: skip
    claim = {"hardware": "H100 SXM", "steps_per_s": 50.0, "tokens_per_step": 8192.0}
    assert checks(plan, **claim)[-1].finding.endswith("H100 SXM's peak: impossible")
    assert not checks(plan, **claim)[-1].holds
    assert all(check.holds for check in checks(plan, **{**claim, "steps_per_s": 10.0}))
    assert len(checks(plan, **{**claim, "hardware": "L4"})) == 1
