"""Signals noted or raised for a block, with the handlers restored afterwards."""

import os
import signal
import threading

import pytest

from ritz._core.signals import noted_signals, terminate_as_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_handlers_are_restored(number):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    with noted_signals() as names:
        os.kill(os.getpid(), number)
        after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    assert names == [number.name]
    assert after == before


def test_a_second_ctrl_c_interrupts_as_usual():
    with noted_signals() as names:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert names == ["SIGINT"]


def test_sigterm_raises_keyboard_interrupt_inside_the_block_only():
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    with noted_signals() as names, terminate_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)

    assert names == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_other_threads_install_no_handlers():
    before, handlers = signal.getsignal(signal.SIGTERM), []

    def work():
        with noted_signals(), terminate_as_interrupt():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert handlers == [before]
