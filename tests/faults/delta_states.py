"""The states of the model of deltas: what lies in an output dir and in its writers, and what compactors offer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Writes = frozenset[str]  # what was written to the tables: all of it, or what a delta holds
_TRIES = 4


@dataclass(frozen=True)
class Rules:
    """The protocol. Without any one of its rules something is lost; NO_LOSS has those that are no use alone.

    ``objects`` is no rule but the kind of storage: a file that is written after its directory was removed is there.
    """

    objects: bool = False
    # bases and marks
    base_is_newest_at_takeover: bool = True  # a restored checkpoint is a base only if the own list has nothing newer
    parent_is_name: bool = True  # a parent is named by its own save id, not by that of what was compacted of it
    sync_base: bool = True  # whoever takes over syncs what counts, before it stands on that or removes others
    ephemeral_keeps_base: bool = True  # the commit of an ephemeral moves neither base nor marks
    failed_keeps_marks: bool = True
    # rotation
    closure: bool = True  # parents stay
    keep_own_base: bool = True  # whatever the policy says
    dependents_first: bool = True
    check_before_removal: bool = True
    sync_before_drop: bool = True  # the owner syncs what supersedes before it drops what that stands for
    superseded_first: bool = True  # or it would be read again
    # offers
    owner_adopts: bool = True  # without: the compactor commits, in the name of the owner
    only_owner_removes: bool = True  # without: the compactor removes what was compacted
    unique_names: bool = True  # no offer is written in a directory of another, not even one after the other
    synced_before_whole: bool = True  # files before offer.json
    adopt_whole: bool = True  # every file is looked at
    adopt_own_epoch: bool = True  # only what was begun under it: others are swept as attempts are
    adopt_what_counts: bool = True  # the delta counts, by the owner's own listing
    keeps_place: bool = True  # that of the delta in the order of commits
    keeps_flags: bool = True  # what is compacted of an ephemeral is one
    # readers
    last_whole: bool = True  # what lacks files is passed over for the delta
    look_again: bool = True  # a reader that misses a link lists again before it calls that damage


class Checkpoint(NamedTuple):
    """A manifest. Its files are there, unless it was compacted: those are where the offer is."""

    directory: str
    save_id: str
    own: tuple[int, int]  # epoch and number of who commits it
    place: tuple[int, int]  # in the order of commits; what is compacted has that of its delta
    parent: str  # save id; "" of a full one
    holds: Writes
    truth: Writes  # what a full save would have held
    ephemeral: bool = False
    of: str = ""  # save id of the delta that it supersedes, with the same rows
    synced: bool = True
    ckpt_id: str = ""

    @property
    def name(self) -> str:
        """The save id by which others stand on its rows."""
        return self.of or self.save_id


class Offer(NamedTuple):
    """A directory of a compactor: of each file, whose attempt wrote it, "" where it is not there."""

    directory: str
    of: str
    holds: Writes
    first: str = ""
    rest: str = ""
    listed: str = ""  # offer.json
    synced: bool = False
    epoch: int = 0  # that its compactor saw


class Trainer(NamedTuple):
    """A process that saves; or one that only adopts. What it need not remember must not make states differ."""

    at: str
    saves: int = 0  # that it may still begin
    epoch: int = 0
    base: str = ""
    live: Writes = frozenset()
    marks: Writes = frozenset()  # since the base
    later: Writes = frozenset()  # since the staging
    job: Checkpoint | None = None  # that is being saved or adopted
    todo: tuple[str, ...] = ()  # directories that it is about to remove, offers too
    n: int = 0
    listed: tuple[Writes, str] = (frozenset(), "")  # by its takeover: save ids, and the newest
    ckpt_id: str = ""


class Compactor(NamedTuple):
    """A process that owns nothing."""

    at: str
    runs: int
    n: int = 0
    delta: Checkpoint | None = None
    directory: str = ""
    epoch: int = 0


class Reader(NamedTuple):
    """A process that restores the newest."""

    at: str
    directories: frozenset[str] = frozenset()
    acknowledged: tuple[int, int] = (0, 0)  # when it began
    tries: int = 0


class State(NamedTuple):
    """The output dir, who is at work, and what may still happen."""

    claims: int
    takeover: tuple[int, Writes]  # epoch, save ids that were committed
    checkpoints: frozenset[Checkpoint]
    offers: frozenset[Offer]
    trainers: tuple[Trainer, ...]
    compactors: tuple[Compactor, ...]
    reader: Reader
    acknowledged: tuple[int, int]
    failures: int
    ephemerals: int
    damages: int  # compacted ones that may still lose a file
    n_offers: int = 0

    @property
    def counting(self) -> list[Checkpoint]:
        """The checkpoints whose manifests count."""
        epoch, committed = self.takeover
        return [found for found in self.checkpoints if found.own[0] >= epoch or found.save_id in committed]

    @property
    def newest(self) -> Checkpoint:
        """What a restore takes."""
        return max(self.counting, key=lambda found: found.place)

    @property
    def next_seq(self) -> int:
        """Number of the next commit."""
        return 1 + max(found.own[1] for found in self.checkpoints)

    def offer(self, directory: str) -> Offer | None:
        """Return what lies in a directory for offers."""
        return next((offer for offer in self.offers if offer.directory == directory), None)

    def with_offer(self, offer: Offer) -> State:
        """Return the state with this in its directory."""
        return self._replace(offers=self._others(offer.directory) | {offer})

    def without_offer(self, directory: str) -> State:
        """Return the state without a directory for offers."""
        return self._replace(offers=self._others(directory))

    def _others(self, directory: str) -> frozenset[Offer]:
        return frozenset(other for other in self.offers if other.directory != directory)

    def without(self, directory: str) -> State:
        """Return the state without the manifest in a directory."""
        return self._replace(checkpoints=frozenset(c for c in self.checkpoints if c.directory != directory))

    def synced(self, directories: Collection[str]) -> State:
        """Return the state in which a power cut leaves the manifests of these directories."""
        checkpoints = (
            c if c.synced or c.directory not in directories else c._replace(synced=True) for c in self.checkpoints
        )
        return self._replace(checkpoints=frozenset(checkpoints))


@dataclass(frozen=True)
class View:
    """What somebody sees who knows these manifests and looks at the files that they list."""

    rules: Rules
    counting: Collection[Checkpoint]
    offers: frozenset[Offer]

    def is_whole(self, found: Checkpoint) -> bool:
        """Say whether all files are there, as far as a listing tells."""
        return not found.of or any(offer.first and offer.rest for offer in self._files(found))

    def is_good(self, found: Checkpoint) -> bool:
        """Say whether all files are those of this checkpoint, as whoever reads them finds."""
        return not found.of or any(offer.first == offer.rest == found.save_id for offer in self._files(found))

    def _files(self, found: Checkpoint) -> list[Offer]:
        return [offer for offer in self.offers if offer.directory == found.directory]

    def named(self, name: str) -> list[Checkpoint]:
        """Return the checkpoints of a name, in the order in which readers take them."""
        found = [c for c in self.counting if name in (c.save_id, c.of)]
        if self.rules.last_whole:
            found = [c for c in found if self.is_whole(c)]
        return sorted(found, key=lambda c: (c.place, c.own, c.save_id), reverse=True)

    def chain(self, name: str) -> list[Checkpoint]:
        """Return the links by which readers get a checkpoint, newest first; [] where one is missing."""
        for found in self.named(name):
            if not self.is_whole(found):
                return []
            below = self.chain(found.parent) if found.parent else []
            if below or not found.parent:
                return [found, *below]
        return []

    def content(self, name: str) -> Writes | None:
        """Return what readers get, None where they call it damaged."""
        links = self.chain(name)
        is_read = links and all(self.is_good(link) for link in links)
        return frozenset().union(*(link.holds for link in links)) if is_read else None

    def damaged(self) -> Iterator[tuple[Checkpoint, str]]:
        """Yield what readers get otherwise than it was saved."""
        for found in self.counting:
            content = self.content(found.name)
            if content is None:
                yield found, "its chain is broken"
            elif content != found.truth:
                yield found, f"restores {sorted(content)}, was {sorted(found.truth)}"


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
        return f"c{self.number + 1}.{self.me.n}"

    def _go(self, at: str, state: State | None = None, **changes: Any) -> State:
        before = self.state if state is None else state
        me = self.me._replace(at=at, **changes) if at != "pick" else Compactor("pick", self.me.runs, self.me.n)
        others = before.compactors
        return before._replace(compactors=(*others[: self.number], me, *others[self.number + 1 :]))

    def _pick(self) -> Iterator[tuple[str, State]]:
        """Choose a delta; its rows are always the same, so that the epoch may be that of the same moment."""
        epoch = self.state.claims
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
                offer = Offer(directory, delta.save_id, holds, first=f"c{self.number + 1}.{me.n}")
                state = self.state.with_offer(offer)._replace(n_offers=self.state.n_offers + 1)
                yield (
                    f"begins {directory}",
                    self._go("finish", state, runs=me.runs - 1, n=me.n, delta=delta, directory=directory, epoch=epoch),
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
        whole = whole._replace(epoch=self.me.epoch)
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
                made = compacted(delta, offer, (state.takeover[0], state.next_seq))
                yield "commits", self._go("pick", state._replace(checkpoints=state.checkpoints | {made}))
        elif any(c.of == delta.save_id for c in state.counting):
            yield "removes the chain", self._go("pick", state.without(delta.directory).without(delta.parent))
        else:
            yield "finds nothing compacted", self._go("pick")


def compacted(delta: Checkpoint, offer: Offer, own: tuple[int, int]) -> Checkpoint:
    """Return the manifest that makes an offer count."""
    return delta._replace(
        directory=offer.directory,
        save_id=offer.listed,
        own=own,
        parent="",
        holds=offer.holds,
        of=delta.save_id,
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
        content = view.content(newest.name) if newest else None
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
