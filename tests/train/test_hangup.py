"""A closed terminal stops a run like a SIGTERM does, and does not stop one that nohup started."""

import os
import signal
from collections.abc import Iterator

import pytest

from expertflow.train import processes
from expertflow.train.run import catching_signals


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def inherited(request: pytest.FixtureRequest) -> Iterator[signal.Handlers]:
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    signal.signal(signal.SIGHUP, before)


def test_the_trainer(inherited: signal.Handlers) -> None:
    with catching_signals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop() == (inherited is signal.SIG_DFL)
    assert signal.getsignal(signal.SIGHUP) is inherited


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_trainer_in_the_background_of_a_script_still_saves_and_ends(
    number: signal.Signals,
) -> None:
    """A shell starts it with interrupts ignored."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with catching_signals() as stop:
            os.kill(os.getpid(), number)
            assert stop()
    finally:
        signal.signal(number, before)


def test_the_launcher_of_several(
    inherited: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left alone, it stops its trainers at a hang-up, whatever it inherited."""
    name = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    for variable in (name, processes.RANK, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(variable, "")  # so that what is set is undone
        monkeypatch.delenv(variable)
    for exec_ in ("execv", "execvp"):
        monkeypatch.setattr(os, exec_, lambda *_: None)
    processes.relaunch(2)
    heard = os.environ.get(name, "SIGHUP").split(",")
    assert ("SIGHUP" in heard) == (inherited is signal.SIG_DFL)
    assert inherited is signal.SIG_DFL or {"SIGTERM", "SIGINT"} <= set(heard)
