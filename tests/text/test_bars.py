"""Bars: when they are drawn, where, and that one that cannot be drawn fails nothing."""

from __future__ import annotations

import io
import itertools
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


def test_a_line_in_the_log_says_what_was_done_and_nothing_is_said_of_what_failed(caplog):
    with caplog.at_level(logging.INFO, "recckpt"), pytest.raises(OSError, match="full"), Progress("saving", 10):
        raise OSError("full")
    assert caplog.text == ""
    with caplog.at_level(logging.INFO, "recckpt"), Progress("saving ckpt_1", 5_000_000) as progress:
        progress.n_rows = 1_234_567
        progress.advance(5_000_000)
    assert "saving ckpt_1: 1,234,567 rows, 5.0 MB in" in caplog.text


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

    def drawn(stream, switch=None, off="", **how):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv(bars.SWITCH, switch) if switch is not None else None
        monkeypatch.setenv("TQDM_DISABLE", off)
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
    assert not drawn(Terminal(), off="1")
    assert not drawn(Terminal(), switch="1", off="1")


def test_what_is_over_soon_shows_no_bar(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(bars, "DELAY_SEC", 1000.0)
    with Progress("saving", 10) as progress, bars.ElapsedTime("recckpt verify"):
        progress.advance(5)
        progress.advance(5)
    assert terminal.getvalue().strip() == ""


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        ValueError("I/O operation on closed file"),
        BrokenPipeError(32, "Broken pipe"),  # tqdm lets this one through
    ],
)
def test_a_bar_that_cannot_be_drawn_fails_nothing(monkeypatch, caplog, error):
    terminal = on_terminal(monkeypatch)
    terminal.error = error
    with caplog.at_level(logging.INFO, "recckpt"), Progress("saving", 10) as progress:
        progress.advance(10)
    assert "saving: 0 rows" in caplog.text
    assert progress.n_bytes == 10

    def load() -> None:
        with Progress("loading", 10) as progress:
            progress.advance(10)

    another = threading.Thread(target=load, daemon=True)
    another.start()
    another.join(60)
    assert not another.is_alive()  # though tqdm has one lock for all bars


class Kernel:
    """The kernel of a notebook: keeps what its outputs have shown, or cannot be reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_gone: bool = False) -> None:
        self.outputs: list[list[str]] = []
        self._is_gone = is_gone
        shell = types.SimpleNamespace(config={"IPKernelApp": {}})
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
        monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=self.display))
        monkeypatch.delenv(bars.SWITCH, raising=False)
        monkeypatch.setattr(bars, "DELAY_SEC", 0.0)

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> types.SimpleNamespace:
        if self._is_gone:
            raise OSError("the kernel is gone")
        assert raw
        assert display_id
        self.outputs.append(shown := [content["text/plain"]])
        return types.SimpleNamespace(update=lambda content, raw: shown.append(content["text/plain"]))


def test_no_stderr_a_closed_one_and_a_kernel_that_is_gone_fail_nothing(monkeypatch):
    closed = Terminal()
    closed.close()
    for stream, is_notebook in ((None, False), (closed, False), (io.StringIO(), True)):
        with monkeypatch.context() as patch, Progress("saving", 10) as progress:
            patch.setattr(sys, "stderr", stream)
            if is_notebook:
                Kernel(patch, is_gone=True)
            with Progress("loading", 10) as progress:
                progress.advance(10)
        assert progress.n_bytes == 10


def test_in_a_notebook_a_bar_is_one_output_that_is_replaced_and_empty_at_its_end(monkeypatch):
    stderr, kernel = io.StringIO(), Kernel(monkeypatch)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)  # each update is seen
    for what in ("saving", "loading"):
        with Progress(what, 10) as progress:
            progress.advance(5)
            progress.advance(5)
    saving, loading = kernel.outputs
    for shown, what in ((saving, "saving"), (loading, "loading")):
        assert [text[: text.find("|")] for text in shown[:-1]] == [f"{what}:   0%", f"{what}:  50%", f"{what}: 100%"]
        assert shown[-1] == ""
    assert "█" in saving[1]
    assert stderr.getvalue() == ""


def test_a_clock_counts_the_seconds_while_no_bar_does(monkeypatch):
    terminal = on_terminal(monkeypatch)
    shown = threading.Event()
    monkeypatch.setattr(terminal, "write", lambda text: "recckpt ls" in text and shown.set())
    with bars.ElapsedTime("recckpt ls"):
        assert shown.wait(60)


def test_a_bar_has_the_line_of_the_clock_where_a_cursor_cannot_go_up(monkeypatch):
    terminal, begun = on_terminal(monkeypatch), threading.Event()
    monkeypatch.setattr(
        terminal, "write", lambda text: (Terminal.write(terminal, text), "verify" in text and begun.set())
    )
    with bars.ElapsedTime("recckpt verify"):
        assert begun.wait(60)
        with Progress("verifying", 10) as progress:
            progress.advance(5)
    assert "verifying: " in terminal.getvalue()
    assert not {"\n", "\x1b"} & set(terminal.getvalue())


def test_a_message_beside_a_bar_has_a_line_of_its_own(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Progress("saving", 10) as progress:
        progress.advance(5)
        with bars.aside():
            terminal.write("a message\n")
    assert "\ra message\n" in terminal.getvalue()


@pytest.mark.parametrize("off", ["", "1"])
def test_a_saver_shows_bars_unless_the_environment_says_otherwise(monkeypatch, tmp_path, off):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("TQDM_DISABLE", off)
    saver = Saver(torch.nn.Linear(2, 2), output_dir=str(tmp_path))
    saver.save("first")
    saver.save_async("second").wait()
    saver.load()
    shown = [what for what in ("saving first", "saving second", "loading second") if what in terminal.getvalue()]
    assert len(shown) == (0 if off else 3)


def test_of_several_ranks_the_first_shows_bars_for_all(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(bars, "are_shown", lambda: begun.append(threading.get_ident()))

    def work(rank, connect):
        saver = connect(Saver(torch.nn.Linear(2, 2), output_dir=str(tmp_path)))
        saver.save("first", shard_id=rank, shard_num=2)
        return threading.get_ident()

    assert set(begun) <= {on_ranks(2, work)[0]}
    assert len(begun) == 1
