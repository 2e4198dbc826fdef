"""Signals: at once where nothing is under way, after the step where something is."""

import os
import signal

import pytest

from experiments.interruption import Interrupted, Interruption


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_outside_the_loop_ends_at_once(number, code):
    with Interruption(), pytest.raises(Interrupted, match=signal.Signals(number).name) as error:
        os.kill(os.getpid(), number)
    assert error.value.exit_code == code


def test_first_signal_in_the_loop_waits_and_the_second_does_not():
    with Interruption() as interruption, interruption.deferred():
        assert interruption.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.requested == signal.SIGTERM
        with pytest.raises(Interrupted) as error:
            os.kill(os.getpid(), signal.SIGINT)
    assert error.value.exit_code == 130


def test_former_handlers_are_put_back():
    before = [signal.getsignal(number) for number in Interruption.SIGNALS]
    with Interruption():
        assert [signal.getsignal(number) for number in Interruption.SIGNALS] != before
    assert [signal.getsignal(number) for number in Interruption.SIGNALS] == before


class InterruptedAtItsEnd:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_that_a_destructor_swallows_is_seen_by_the_loop():
    with Interruption() as interruption:
        InterruptedAtItsEnd()
        with interruption.deferred():
            assert interruption.requested == signal.SIGTERM
