"""The protocol of deltas (docs/format.md, 12) as a model of which all states are visited, with every crash."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from faults.all_states import Lost, all_states
from faults.delta_states import (
    Checkpoint,
    Compactor,
    CompactorTurn,
    Offer,
    Reader,
    ReaderTurn,
    Rules,
    State,
    Trainer,
    View,
    Writes,
    compacted,
)

Steps = Iterator[tuple[str, State]]
_CHECKS = {"hold", "sweep", "idle", "check", "adopt"}


@dataclass(frozen=True)
class Habits:
    """What trainers do of what they may.

    Attributes:
        keep: how many the policy wants; None for all.
        deltas_only: whether a trainer with a base never saves in full.
        overwrite: whether an id that is committed may be saved anew.
        any_step: whether a trainer may restore another checkpoint than the newest.
    """

    keep: int | None = 1
    deltas_only: bool = False
    overwrite: bool = False
    any_step: bool = True


class TrainerTurn:
    """A state in which it is one trainer's turn."""

    def __init__(self, rules: Rules, habits: Habits, state: State, number: int) -> None:
        self.rules, self.habits, self.state, self.number = rules, habits, state, number
        self.me = state.trainers[number]
        self.owns = state.claims == self.me.epoch

    @cached_property
    def view(self) -> View:
        """What it sees when it lists the output dir."""
        return View(self.rules, self.state.counting, self.state.offers)

    def steps(self) -> Steps:
        """Yield what it may do, and the state after."""
        yield from getattr(self, f"_{self.me.at}")()

    @property
    def _is_adopter(self) -> bool:
        return not self.me.ckpt_id

    def _go(self, at: str, state: State | None = None, **changes: Any) -> State:
        before = self.state if state is None else state
        me = self.me._replace(at=at, **changes)
        if at == "idle":
            me = me._replace(job=None, todo=()) if me.saves else Trainer("stopped")
        elif at == "stopped":
            me = Trainer("stopped")
        return before._replace(trainers=(*before.trainers[: self.number], me, *before.trainers[self.number + 1 :]))

    def _stopped(self) -> Steps:
        yield from ()

    # taking over

    def _restore(self) -> Steps:
        for found in self.view.counting:
            if found.place == self.state.newest.place or self.habits.any_step:
                links = self.view.chain(found.name)
                if links and links[0] is found:
                    live = frozenset[str]().union(*(link.holds for link in links))
                    base = found.name if self.rules.parent_is_name else found.save_id
                    yield f"restores {found.save_id}", self._go("claim", base=base, live=live, ckpt_id=found.ckpt_id)

    def _claim(self) -> Steps:
        epoch = self.state.claims + 1
        yield "claims", self._go("list", self.state._replace(claims=epoch), epoch=epoch)

    def _list(self) -> Steps:
        newest = self.state.newest
        committed = frozenset(found.save_id for found in self.view.counting)
        todo = tuple(offer.directory for offer in self._open_offers if self._is_earlier(offer))
        yield "lists", self._go("publish", listed=(committed, newest.name), todo=todo)

    @property
    def _open_offers(self) -> list[Offer]:
        taken = {found.directory for found in self.state.checkpoints}
        return [offer for offer in self.state.offers if offer.directory not in taken]

    def _is_earlier(self, offer: Offer) -> bool:
        """Say whether an offer is an attempt of a lower epoch; its first file says so, whoever wrote it."""
        begun = {c.directory: c.epoch for c in self.state.compactors if c.directory}
        return begun.get(offer.directory, offer.epoch) < self.me.epoch

    def _publish(self) -> Steps:
        last = max(self.state.takeover, (self.me.epoch, self.me.listed[0]), key=lambda takeover: takeover[0])
        listed = [c.directory for c in self.state.checkpoints if c.save_id in self.me.listed[0]]
        state = self.state.synced(listed) if self.rules.sync_base else self.state
        at = "sweep" if self.me.todo else "hold"
        yield "publishes", self._go(at, state._replace(takeover=last), listed=(frozenset(), self.me.listed[1]))

    def _sweep(self) -> Steps:
        """Check, before what earlier owners were offered goes."""
        yield ("goes on", self._go("empty")) if self.owns else ("is fenced", self._go("stopped"))

    def _hold(self) -> Steps:
        """Check once more, and look whether there is a base."""
        if not self.owns:
            yield "is fenced", self._go("stopped")
            return
        if self._is_adopter:
            yield "holds", self._go("adopt", self._with_own_offer(), listed=(frozenset(), ""))
            return
        base = self.me.base
        name = next((found.name for found in self.view.counting if base in (found.save_id, found.of)), "")
        is_newest = name == self.me.listed[1] or not self.rules.base_is_newest_at_takeover
        links = self.view.chain(base) if name and is_newest else []
        yield (
            "holds" if links else "holds, and has no base",
            self._go("idle", base=base if links else "", listed=(frozenset(), "")),
        )

    def _with_own_offer(self) -> State:
        """Return the state in which ``compact --adopt`` has offered the newest, of its own epoch."""
        newest, state = self.state.newest, self.state
        links = self.view.chain(newest.name)
        if not links or not links[0].parent:
            return state
        save_id, holds = f"own{self.me.epoch}", frozenset[str]().union(*(link.holds for link in links))
        offer = Offer(f"{newest.name}.{save_id}", newest.name, holds, save_id, save_id, save_id, True, self.me.epoch)
        return state.with_offer(offer)

    # saving

    def _idle(self) -> Steps:
        if not self.owns:
            yield "is fenced", self._go("stopped")
            return
        if self.me.base and not self.view.chain(self.me.base):
            yield f"misses its base {self.me.base}", self._go("stranded")
            return
        save_id = f"{'ABC'[self.number]}{self.me.n + 1}"
        later: Writes = frozenset({save_id + "'"})  # what is written while the save is under way
        live, marks = self.me.live | {save_id}, self.me.marks | {save_id}
        told = {"saves": self.me.saves - 1, "n": self.me.n + 1, "live": live | later, "marks": marks | later}
        for label, job in self._jobs(save_id, live, marks):
            state = self.state._replace(ephemerals=self.state.ephemerals - job.ephemeral)
            yield f"begins {label}", self._go("put", state, **told, later=later, job=job)
            if self.state.failures:
                failed = told if self.rules.failed_keeps_marks else {**told, "marks": later}
                state = state._replace(failures=state.failures - 1)
                yield f"fails with {label}", self._go("idle", state, **failed)

    def _jobs(self, save_id: str, live: Writes, marks: Writes) -> Iterator[tuple[str, Checkpoint]]:
        base = self.me.base
        place = self.me.epoch, self.state.next_seq
        full = Checkpoint(save_id, save_id, place, place, "", live, live, synced=False, ckpt_id=save_id)
        jobs = [("delta", full._replace(parent=base, holds=marks))] if base else []
        if not base or not self.habits.deltas_only:
            jobs.append(("full", full))
        for kind, job in jobs:
            yield f"{kind} {save_id}", job
            if self.state.ephemerals:
                yield f"ephemeral {kind} {save_id}", job._replace(ephemeral=True)
            if self.habits.overwrite:
                yield f"{kind} {save_id} of {self.me.ckpt_id}", job._replace(ckpt_id=self.me.ckpt_id)

    def _put(self) -> Steps:
        job = self.me.job
        assert job is not None
        yield (
            f"puts {job.save_id}",
            self._go("acknowledge", self.state._replace(checkpoints=self.state.checkpoints | {job})),
        )

    def _acknowledge(self) -> Steps:
        job = self.me.job
        assert job is not None
        state = self.state.synced([job.directory])
        if not self.owns:
            yield "is fenced", self._go("stopped", state)
            return
        moves = not (job.ephemeral and self.rules.ephemeral_keeps_base)
        base = {"base": job.save_id, "ckpt_id": job.ckpt_id} if not job.ephemeral else {}
        marks = self.me.later if moves else self.me.marks
        state = state._replace(acknowledged=job.place)
        yield f"has {job.save_id}", self._go("rotate", state, **base, marks=marks, later=frozenset(), job=None)

    # rotating

    def _rotate(self) -> Steps:
        if self.rules.check_before_removal and not self.owns:
            yield "is fenced", self._go("stopped")
            return
        victims, kept = self._victims()
        state = self.state.synced(kept) if self.rules.sync_before_drop else self.state
        after = "idle" if self._is_adopter else "adopt"
        yield f"rotates {victims}", self._go("remove" if victims else after, state, todo=victims)

    def _victims(self) -> tuple[tuple[str, ...], set[str]]:
        """Return which directories go, in order, and which are kept for good."""
        counting = sorted(self.view.counting, key=lambda c: (c.place, c.own, c.save_id))
        last = {found.ckpt_id: found.name for found in counting}
        regular = {c.place: c.name for c in counting if not c.ephemeral and last[c.ckpt_id] == c.name}
        keep = None if self._is_adopter else self.habits.keep
        wanted = list(regular.values())
        todo = [counting[-1].name, *(wanted if keep is None else wanted[len(wanted) - keep :] if keep else [])]
        if self.rules.keep_own_base and self.me.base:
            todo.append(self.me.base)
        kept: dict[str, str] = {}  # name -> the directory by which readers get it
        while todo:
            name = todo.pop()
            named = self.view.named(name)
            if name not in kept and named:
                kept[name] = named[0].directory
                if named[0].parent and self.rules.closure:
                    parents = (c.name for c in counting if named[0].parent in (c.save_id, c.of))
                    todo.append(next(parents, named[0].parent))
        gone = [c for c in counting if c.directory not in kept.values() and self.view.named(c.name)]
        read = {c.ckpt_id: c.directory for c in counting if self.view.is_whole(c)}.values()
        superseders = {c.directory for c in counting if c.of}  # those that go, too: others stand on them until then
        return tuple(self._in_order(gone, read)), {*kept.values(), *superseders}

    def _in_order(self, left: list[Checkpoint], read: Collection[str]) -> Iterator[str]:
        """Yield again and again one on which none of those left stands: superseded ones first, the earliest first."""
        while left:
            below = {self.view.named(c.parent)[0].directory for c in left if c.parent and self.view.is_whole(c)}
            free = [c for c in left if c.directory not in below] if self.rules.dependents_first else left
            following = min(free, key=lambda c: (c.directory in read) is self.rules.superseded_first)
            yield following.directory
            left.remove(following)

    def _check(self) -> Steps:
        owns = self.owns or not self.rules.check_before_removal
        yield "checks", self._go("remove" if owns else "stopped")

    def _remove(self) -> Steps:
        """Remove the manifest of the first; of what was not compacted nobody reads the rest then."""
        directory = self.me.todo[0]
        state = self.state.without(directory)
        if state.offer(directory) is None:
            yield f"removes {directory}", self._next(state)
            return
        yield f"removes the manifest of {directory}", self._go("remove_files", state)

    def _remove_files(self) -> Steps:
        yield f"removes the files of {self.me.todo[0]}", self._next(self.state.without_offer(self.me.todo[0]))

    def _next(self, state: State) -> State:
        todo = self.me.todo[1:]
        return self._go("check" if todo else "idle" if self._is_adopter else "adopt", state, todo=todo)

    # adopting

    def _adopt(self) -> Steps:
        """Look at the offers: one that will do is adopted."""
        after = "rotate" if self._is_adopter else "idle"
        if not self.owns:
            yield "is fenced", self._go("stopped")
            return
        found = [job for offer in self._open_offers if (job := self._adoptable(offer)) is not None]
        for job in found:
            yield f"finds {job.directory} whole", self._go("put_offer", job=job)
        if not found:
            yield "finds no offer", self._go(after)

    def _adoptable(self, offer: Offer) -> Checkpoint | None:
        """Return the manifest for an offer, None where it is not to be adopted."""
        is_whole = offer.listed and (not self.rules.adopt_whole or (offer.first and offer.rest))
        if not is_whole or (offer.epoch != self.me.epoch and self.rules.adopt_own_epoch):
            return None
        known = self.view.counting if self.rules.adopt_what_counts else self.state.checkpoints
        delta = next((found for found in known if found.save_id == offer.of), None)
        if delta is None or any(not found.parent for found in self.view.named(offer.of)):
            return None
        own = self.me.epoch, self.state.next_seq
        job = compacted(delta, offer, own)
        job = job if self.rules.keeps_place else job._replace(place=own)
        return job if self.rules.keeps_flags else job._replace(ephemeral=False)

    def _put_offer(self) -> Steps:
        job, state = self.me.job, self.state
        assert job is not None
        is_taken = any(found.directory == job.directory for found in state.checkpoints)
        if is_taken or (state.offer(job.directory) is None and not self.rules.objects):
            yield f"fails to adopt {job.directory}", self._go("idle")
        else:
            after = state._replace(checkpoints=state.checkpoints | {job})
            gives_the_same = after.newest.truth == state.newest.truth
            yield f"adopts {job.directory}", self._go("sync_offer" if gives_the_same else "misleading", after)

    def _sync_offer(self) -> Steps:
        assert self.me.job is not None
        state = self.state.synced([self.me.job.directory])
        at = "rotate" if self._is_adopter else "idle"
        yield "has it", self._go(at if self.owns else "stopped", state, job=None)
        if self.state.failures:
            state = self.state._replace(failures=self.state.failures - 1)
            yield "cannot sync it", self._go(at if self.owns else "stopped", state, job=None)

    def _empty(self) -> Steps:
        """Remove the files of an offer of a lower epoch, whatever they are by now."""
        directory = self.me.todo[0]
        offer = self.state.offer(directory)
        if offer is None:
            yield "finds it gone", self._swept(self.state)
            return
        empty = offer._replace(first="", rest="", listed="")
        yield f"empties {directory}", self._go("remove_dir", self.state.with_offer(empty))

    def _remove_dir(self) -> Steps:
        directory = self.me.todo[0]
        offer = self.state.offer(directory)
        is_empty = offer is not None and not (offer.first or offer.rest or offer.listed)
        yield f"ends with {directory}", self._swept(self.state.without_offer(directory) if is_empty else self.state)

    def _swept(self, state: State) -> State:
        todo = self.me.todo[1:]
        return self._go("empty" if todo else "hold", state, todo=todo)


@dataclass(frozen=True)
class Bounds:
    """How much may happen.

    Attributes:
        saves: of each trainer; None for ``recckpt compact --adopt``, which takes over, adopts and rotates.
        compactions: of each compactor.
        failures: saves that may fail.
        ephemerals: saves that may be ephemeral.
        damages: compacted ones that may lose a file while the chain that they stand for is whole.
        from_delta: whether it begins with a delta on a full checkpoint, or with the full one alone.
        reads: whether a reader is at work.
        habits: of the trainers.
    """

    saves: tuple[int | None, ...]
    compactions: tuple[int, ...] = ()
    failures: int = 0
    ephemerals: int = 0
    damages: int = 0
    from_delta: bool = True
    reads: bool = False
    habits: Habits = field(default_factory=Habits)


@dataclass(frozen=True)
class Model:
    """The protocol within bounds."""

    rules: Rules
    bounds: Bounds

    def check(self) -> int:
        """Go through all states, those of the fewest steps first, and return how many there are.

        Raises:
            Lost: in one of them something is lost.
        """
        seen: set[tuple[object, ...]] = set()  # most steps change nothing that readers look at

        def check(state: State) -> None:
            looked_at = state.checkpoints, state.offers, state.takeover, state.acknowledged
            self._check_those_at_work(state)
            if looked_at not in seen:
                seen.add(looked_at)
                self._check_output_dir(state)

        return all_states(self._start(), self._steps, check)

    def _start(self) -> State:
        full = Checkpoint("P", "P", (1, 1), (1, 1), "", frozenset("p"), frozenset("p"), ckpt_id="P")
        delta = Checkpoint("D", "D", (1, 2), (1, 2), "P", frozenset("d"), frozenset("pd"), ckpt_id="D")
        last = delta if self.bounds.from_delta else full
        first, *others = self.bounds.saves
        owner = Trainer("idle", first or 0, 1, last.save_id, last.truth, ckpt_id=last.ckpt_id)
        trainers = [owner if first else Trainer("stopped")]
        trainers += [Trainer("restore", saves) if saves else Trainer("claim") for saves in others]
        return State(
            claims=1,
            takeover=(1, frozenset()),
            checkpoints=frozenset({full, last}),
            offers=frozenset(),
            trainers=tuple(trainers),
            compactors=tuple(Compactor("pick", runs) for runs in self.bounds.compactions),
            reader=Reader("list" if self.bounds.reads else "done"),
            acknowledged=last.place,
            failures=self.bounds.failures,
            ephemerals=self.bounds.ephemerals,
            damages=self.bounds.damages,
        )

    def _steps(self, state: State) -> Iterator[tuple[str, Iterator[State]]]:
        trainers = list(range(len(state.trainers)))
        for number, trainer in enumerate(state.trainers):
            if trainer.at in _CHECKS and trainer.epoch < state.claims:  # touches nothing: the order is free
                trainers = [number]
                break
        else:
            for number in range(len(state.compactors)):
                yield from _labelled(f"compactor {number + 1}", CompactorTurn(self.rules, state, number).steps())
            yield from _labelled("reader", ReaderTurn(self.rules, state).steps())
            yield from _labelled("the disk", self._damages(state))
        for number in trainers:
            turn = TrainerTurn(self.rules, self.bounds.habits, state, number)
            yield from _labelled(f"trainer {'ABC'[number]}", turn.steps())

    def _damages(self, state: State) -> Iterator[tuple[str, State]]:
        """Lose a file of a compacted one that nobody relies on yet: who drops the chain does it since that is whole."""
        is_relied_on = any(trainer.todo for trainer in state.trainers)
        for one in state.counting if state.damages and not is_relied_on else ():
            offer = state.offer(one.directory)
            others = View(self.rules, [found for found in state.counting if found is not one], state.offers)
            if offer is not None and offer.first and others.chain(one.of):
                torn = state.with_offer(offer._replace(first=""))
                yield f"loses a file of {one.directory}", torn._replace(damages=state.damages - 1)

    def _check_those_at_work(self, state: State) -> None:
        if state.reader.at == "misled":
            raise Lost("a reader gets what was not saved, or calls damaged what is whole")
        if any(trainer.at == "stranded" for trainer in state.trainers):
            raise Lost("a base is gone under its owner")
        if any(trainer.at == "misleading" for trainer in state.trainers):
            raise Lost("an adoption changes what a restore gives")

    def _check_output_dir(self, state: State) -> None:
        counting = state.counting
        self._check_readers(state, counting, "")
        loose = [found for found in counting if not found.synced]
        torn = frozenset(offer for offer in state.offers if offer.synced or not offer.listed)
        cuts = [[found for found in counting if found is not one] for one in loose]
        cuts += [[found for found in counting if found.synced]] if len(loose) > 1 else []
        for left in cuts:
            self._check_readers(state, left, " after a power cut")
        if len(torn) < len(state.offers):
            self._check_readers(state._replace(offers=torn), counting, " after a power cut")
        epoch, committed = state.takeover
        for found in counting:
            known = found.place[0] >= epoch or found.save_id in committed or found.of in committed
            if found.of and not known:
                raise Lost(f"{found.save_id} brings back {found.of}, which does not count")

    def _check_readers(self, state: State, counting: list[Checkpoint], when: str) -> None:
        for found, what in View(self.rules, counting, state.offers).damaged():
            raise Lost(f"{found.save_id}: {what}{when}")
        newest = max((found.place for found in counting), default=(0, 0))
        if newest < state.acknowledged:
            raise Lost(f"{state.acknowledged} was acknowledged, and readers get {newest}{when}")


def _labelled(who: str, steps: Iterator[tuple[str, State]]) -> Iterator[tuple[str, Iterator[State]]]:
    for label, after in steps:
        yield f"{who} {label}", iter((after,))
