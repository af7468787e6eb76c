"""A run's wall time begins when its process does."""

import subprocess
import sys
import time

from support import SCRIPTS

from expertflow.train.timing import process_age_s

AGE = "from expertflow.train.timing import process_age_s; print(process_age_s())"
TICK_S = 0.011


def test_the_age_of_a_process_is_known_to_a_hundredth() -> None:
    before = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", AGE],
        env={"PYTHONPATH": str(SCRIPTS)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 0 < float(done.stdout) < time.perf_counter() - before + TICK_S


def test_it_grows_with_time() -> None:
    start, one = time.perf_counter(), process_age_s()
    time.sleep(0.05)
    grown_s, most_s = process_age_s() - one, time.perf_counter() - start
    assert 0.05 <= grown_s <= most_s
