"""Bars: when they are drawn, where, and that one that cannot be drawn fails nothing."""

from __future__ import annotations

import io
import logging
import sys
import threading
import types

import pytest
import torch
from support.thread_ranks import on_ranks

from recckpt import Saver
from recckpt.text import Progress, bars


class Terminal(io.StringIO):
    """A terminal that keeps what it is given, or that is broken."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal on which bars appear at once; no fixture, since pytest replaces stderr after those."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(bars, "DELAY_SEC", 0.0)
    monkeypatch.delenv(bars.SWITCH, raising=False)
    return stream


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


def test_a_bar_is_drawn_on_a_terminal_and_where_the_environment_says_so(monkeypatch):
    terminal = on_terminal(monkeypatch)

    def drawn(stream, switch=None, **how):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv(bars.SWITCH, switch) if switch is not None else None
        with Progress("saving", 10, **how) as progress:
            progress.advance(10)
        return "saving" in stream.getvalue()

    assert drawn(terminal)
    assert not drawn(Terminal(), has_bar=False)
    assert not drawn(io.StringIO())
    assert not drawn(Terminal(), switch="0")
    assert drawn(io.StringIO(), switch="1")
    assert not drawn(io.StringIO(), switch="1", has_bar=False)
    assert drawn(Terminal(), switch="")


def test_what_is_over_soon_shows_no_bar(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(bars, "DELAY_SEC", 1000.0)
    with Progress("saving", 10) as progress, bars.ElapsedTime("recckpt verify"):
        progress.advance(5)
        progress.advance(5)
    assert terminal.getvalue().strip() == ""


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("I/O operation on closed file")])
def test_a_bar_that_cannot_be_drawn_fails_nothing(monkeypatch, caplog, error):
    terminal = on_terminal(monkeypatch)
    terminal.error = error
    with caplog.at_level(logging.INFO, "recckpt"), Progress("saving", 10) as progress:
        progress.advance(10)
    assert "saving: 0 rows" in caplog.text
    assert progress.n_bytes == 10


def test_no_stderr_a_closed_one_and_broken_widgets_fail_nothing(monkeypatch):
    closed = Terminal()
    closed.close()
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    kernel = types.SimpleNamespace(get_ipython=lambda: shell)
    broken = types.SimpleNamespace(tqdm=lambda **_: (_ for _ in ()).throw(RuntimeError("no widgets")))
    for stream, modules in ((None, {}), (closed, {}), (io.StringIO(), {"IPython": kernel, "tqdm.auto": broken})):
        with monkeypatch.context() as patch, Progress("saving", 10) as progress:
            patch.setattr(sys, "stderr", stream)
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            with Progress("loading", 10) as progress:
                progress.advance(10)
        assert progress.n_bytes == 10


def test_notebooks_have_the_bars_of_notebooks(monkeypatch):
    made = []
    bar = types.SimpleNamespace(update=made.append, close=lambda: made.append("closed"))
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=lambda **_: bar))
    with Progress("saving", 10) as progress:
        progress.advance(10)
    assert made == [10, "closed"]


def test_a_clock_counts_the_seconds_while_no_bar_does(monkeypatch):
    terminal = on_terminal(monkeypatch)
    shown = threading.Event()
    monkeypatch.setattr(terminal, "write", lambda text: "recckpt ls" in text and shown.set())
    with bars.ElapsedTime("recckpt ls"):
        assert shown.wait(60)


def test_a_message_beside_a_bar_has_a_line_of_its_own(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Progress("saving", 10) as progress:
        progress.advance(5)
        with bars.aside():
            terminal.write("a message\n")
    assert "\ra message\n" in terminal.getvalue()


@pytest.mark.parametrize("progress", [True, False])
def test_a_saver_shows_bars_unless_told_not_to(monkeypatch, tmp_path, progress):
    terminal = on_terminal(monkeypatch)
    saver = Saver(torch.nn.Linear(2, 2), output_dir=str(tmp_path), progress=progress)
    saver.save("first")
    saver.save_async("second").wait()
    saver.load()
    shown = [what for what in ("saving first", "saving second", "loading second") if what in terminal.getvalue()]
    assert len(shown) == 3 * progress


def test_of_several_ranks_the_first_shows_bars_for_all(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(bars, "are_shown", lambda: begun.append(threading.get_ident()))

    def work(rank, connect):
        saver = connect(Saver(torch.nn.Linear(2, 2), output_dir=str(tmp_path)))
        saver.save("first", shard_id=rank, shard_num=2)
        return threading.get_ident()

    assert set(begun) <= {on_ranks(2, work)[0]}
    assert len(begun) == 1
