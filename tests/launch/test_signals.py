"""Signals are requests while ranks run, and what they were before afterwards."""

import signal
import threading

from paceline.launch.signals import StopSignals


def test_the_first_signal_is_a_request_and_a_second_ctrl_c_an_order() -> None:
    with StopSignals() as signals:
        assert (signals.first, signals.kill) == (None, False)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # schedulers send it more than once
        assert (signals.first, signals.kill) == ("SIGTERM", False)
        signal.raise_signal(signal.SIGINT)
        assert (signals.first, signals.kill) == ("SIGTERM", True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGINT)
        assert signals.first is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_nothing_changes() -> None:
    seen: list[object] = []

    def enter() -> None:
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
