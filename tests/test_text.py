import io
import logging
import sys
import threading

import pytest

from recckpt.text import Progress, cell


def test_a_line_in_the_log_says_what_was_done(caplog):
    with caplog.at_level(logging.INFO, "recckpt"), Progress("saving ckpt_1", 5_000_000) as progress:
        progress.n_rows = 1_234_567
        progress.advance(5_000_000)
    assert "saving ckpt_1: 1,234,567 rows, 5.0 MB in" in caplog.text


def test_nothing_is_said_of_what_failed(caplog):
    with caplog.at_level(logging.INFO, "recckpt"), pytest.raises(OSError, match="full"), Progress("saving", 10):
        raise OSError("full")
    assert caplog.text == ""


def test_bytes_of_several_threads_add_up():
    with Progress("saving", 8000) as progress:
        threads = [threading.Thread(target=lambda: [progress.advance(1) for _ in range(1000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert progress.n_bytes == 8000
    assert progress.seconds >= 0


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch, terminal):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("saving", 10) as progress:
        progress.advance(10)
    assert ("saving" in stream.getvalue()) is terminal


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1_790_000_123.5, "1790000123.5"),  # seconds since 1970
        (1_790_000_000.0, "1790000000"),
        (-2.5e6, "-2500000"),
        (0.0000123456789, "1.23457e-05"),
        (1e30, "1e+30"),
        (float("nan"), "nan"),
        ([1.0, 0.25], "[1, 0.25]"),
    ],
)
def test_a_time_is_shown_to_the_second_and_other_numbers_with_six_digits(value, shown):
    assert cell(value) == shown
