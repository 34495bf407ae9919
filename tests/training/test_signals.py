"""Signals become a flag, whatever they interrupt; the former handlers come back."""

import os
import signal
import threading

import pytest

from megatron.training.signals import catch_signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_sets_the_flag_and_a_second_changes_nothing(name, capfd):
    before = signal.getsignal(signal.Signals[name])
    with catch_signals("SIGUSR1") as request:
        assert not request.is_set
        os.kill(os.getpid(), signal.Signals[name])
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.is_set and request.signal_name == name
    assert signal.getsignal(signal.Signals[name]) is before
    text = capfd.readouterr().err
    assert f"{name} received: finishing the step" in text and "SIGTERM received: already stopping" in text


def test_other_signals_keep_their_handlers():
    before = signal.getsignal(signal.SIGUSR1)
    with catch_signals(None):
        assert signal.getsignal(signal.SIGUSR1) is before


def test_outside_the_main_thread_nothing_is_caught():
    seen = []

    def body():
        with catch_signals(None) as request:
            seen.append(request.is_set)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]
