"""Signals are requests while ranks run, and what they were before afterwards."""

import signal
import threading

import pytest

from paceline.elastic.failure import StopSignals, exit_code_of, sigterm_as_exit, stopped_before


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


def test_sigterm_before_ranks_run_unwinds_with_its_exit_code_and_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    unwound = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # schedulers send it more than once
            unwound.append(True)

    with pytest.raises(SystemExit) as ended, sigterm_as_exit():
        work()
    assert (ended.value.code, unwound) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert capfd.readouterr().err == "paceline: ended by SIGTERM\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit("words"), 1),
        (SystemExit(7), 7),
        (stopped_before("it began", "SIGTERM"), 143),
        (stopped_before("it began", "SIGINT"), 130),
        (ValueError(), 1),
    ],
)
def test_exit_codes_say_which_signal_ended_a_command(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code
