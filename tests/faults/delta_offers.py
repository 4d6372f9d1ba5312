"""The delta protocol: those who own nothing. Compactors write offers; a reader restores the newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from faults.delta_states import Checkpoint, Compactor, Offer, Reader, Rules, State, View

_TRIES = 4


class CompactorTurn:
    """A state in which it is one compactor's turn."""

    def __init__(self, rules: Rules, state: State, number: int) -> None:
        self.rules, self.state, self.number = rules, state, number
        self.me = state.compactors[number]

    def steps(self) -> Iterator[tuple[str, State]]:
        """Yield what it may do, and the state after."""
        if self.me.at != "pick" or self.me.runs:
            yield from getattr(self, f"_{self.me.at}")()

    @property
    def _save_id(self) -> str:
        return f"form{self.number + 1}.{self.me.n}"

    def _go(self, at: str, state: State | None = None, **changes: Any) -> State:
        before = self.state if state is None else state
        me = self.me._replace(at=at, **changes) if at != "pick" else Compactor("pick", self.me.runs, self.me.n)
        others = before.compactors
        return before._replace(compactors=(*others[: self.number], me, *others[self.number + 1 :]))

    def _pick(self) -> Iterator[tuple[str, State]]:
        view = View(self.rules, self.state.counting, self.state.offers)
        for delta in view.counting:
            links = view.chain(delta.save_id)
            if delta.parent and links and links[0] is delta:
                directory = f"{delta.save_id}.{self.state.n_offers + 1}"
                if not self.rules.unique_names:
                    taken = {offer.directory for offer in self.state.offers}
                    directory = next(n for k in range(1, 9) if (n := f"{delta.save_id}.{k}") not in taken)
                me = self.me._replace(n=self.me.n + 1)
                holds = frozenset[str]().union(*(link.holds for link in links))
                offer = Offer(directory, delta.save_id, holds, first=f"form{self.number + 1}.{me.n}")
                state = self.state.with_offer(offer)._replace(n_offers=self.state.n_offers + 1)
                yield (
                    f"begins {directory}",
                    self._go("finish", state, runs=me.runs - 1, n=me.n, delta=delta, directory=directory),
                )

    def _finish(self) -> Iterator[tuple[str, State]]:
        """Write the last files and ``offer.json``; what was removed meanwhile is not written again."""
        offer = self.state.offer(self.me.directory)
        if offer is None and not self.rules.objects:
            yield "finds it gone", self._go("pick")
            return
        assert self.me.delta is not None
        if offer is None:
            offer = Offer(self.me.directory, self.me.delta.save_id, frozenset())
        whole = offer._replace(rest=self._save_id, listed=self._save_id, synced=self.rules.synced_before_whole)
        at = "pick" if self.rules.owner_adopts and self.rules.only_owner_removes else "commit"
        yield "offers", self._go(at, self.state.with_offer(whole))

    def _commit(self) -> Iterator[tuple[str, State]]:
        """Do what a compactor must not do."""
        delta, state = self.me.delta, self.state
        assert delta is not None
        if not self.rules.owner_adopts:
            offer = state.offer(self.me.directory)
            if (
                offer is not None
                and offer.listed
                and not any(c.directory == offer.directory for c in state.checkpoints)
            ):
                form = form_of(delta, offer, state.takeover[0], delta.place)
                yield "commits", self._go("pick", state._replace(checkpoints=state.checkpoints | {form}))
        elif any(c.form_of == delta.save_id for c in state.counting):
            yield "removes the chain", self._go("pick", state.without(delta.directory).without(delta.parent))
        else:
            yield "finds no form", self._go("pick")


def form_of(delta: Checkpoint, offer: Offer, epoch: int, place: tuple[int, int]) -> Checkpoint:
    """Return the manifest that makes an offer count."""
    return delta._replace(
        directory=offer.directory,
        save_id=f"{offer.listed}@{epoch}",
        epoch=epoch,
        place=place,
        parent="",
        holds=offer.holds,
        form_of=delta.save_id,
        offer=offer.listed,
        synced=False,
    )


class ReaderTurn:
    """A state in which it is the reader's turn: it lists names, then reads what it finds there."""

    def __init__(self, rules: Rules, state: State) -> None:
        self.rules, self.state, self.me = rules, state, state.reader

    def steps(self) -> Iterator[tuple[str, State]]:
        """Yield what it does, and the state after."""
        if self.me.at == "list":
            acknowledged = max(self.me.acknowledged, self.state.acknowledged if not self.me.tries else (0, 0))
            names = frozenset(found.directory for found in self.state.checkpoints)
            yield "lists", self._go(Reader("read", names, acknowledged, self.me.tries + 1))
        elif self.me.at == "read":
            yield self._read()

    def _go(self, me: Reader) -> State:
        return self.state._replace(reader=me)

    def _read(self) -> tuple[str, State]:
        found = [c for c in self.state.counting if c.directory in self.me.directories]
        view = View(self.rules, found, self.state.offers)
        newest = max(found, key=lambda c: c.place, default=None)
        content = view.content(newest.origin) if newest else None
        is_stale = newest is None or newest.place < self.me.acknowledged  # what replaced it was put after the listing
        if newest is None or content is None or is_stale:
            if not self.rules.look_again and not is_stale and newest:
                return f"calls {newest.save_id} damaged", self._go(Reader("misled"))
            if self.me.tries < _TRIES:
                return "lists again", self._go(self.me._replace(at="list", directories=frozenset()))
            return "gives up: removed", self._go(Reader("done"))
        if content != newest.truth:
            return f"gets {sorted(content)} of {newest.save_id}", self._go(Reader("misled"))
        return f"reads {newest.save_id}", self._go(Reader("done"))
