"""A model of delta checkpoints: chains, rotation, takeovers, offers and their adoption, power cuts, in small steps.

One output dir; trainers, of which the first owns it and later ones take it over; compactors, which own nothing; a
reader. Whoever stands still for ever is dead, so deaths need no step. A checkpoint is the set of writes in it, and a
delta those since its base: a wrong chain or a lost mark shows as a wrong set. Left out: damage of bits, the shards of a
checkpoint, policies other than max_keep, and directories of savers (in the model of the fencing).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from faults.all_states import Lost, all_states
from faults.delta_offers import CompactorTurn, ReaderTurn
from faults.delta_states import Checkpoint, Compactor, Reader, Rules, State, Trainer, View
from faults.delta_trainer import Habits, TrainerTurn

_CHECKS = {"hold", "idle", "check", "adopt"}


@dataclass(frozen=True)
class Bounds:
    """How much may happen.

    Attributes:
        saves: of each trainer; None for ``recckpt compact --adopt``, which takes over, adopts and rotates.
        compactions: of each compactor.
        failures: saves that may fail.
        ephemerals: saves that may be ephemeral.
        days: offers that may grow old.
        damages: forms that may lose a file while the chain that they stand for is whole.
        from_delta: whether it begins with a delta on a full checkpoint, or with the full one alone.
        reads: whether a reader is at work.
        habits: of the trainers.
    """

    saves: tuple[int | None, ...]
    compactions: tuple[int, ...] = ()
    failures: int = 0
    ephemerals: int = 0
    days: int = 0
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
        full = Checkpoint("P", "P", 1, (1, 1), "", frozenset("p"), frozenset("p"), ckpt_id="P")
        delta = Checkpoint("D", "D", 1, (1, 2), "P", frozenset("d"), frozenset("pd"), ckpt_id="D")
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
            days=self.bounds.days,
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
            yield from _labelled("a day:", self._days(state))
            yield from _labelled("the disk", self._damages(state))
        for number in trainers:
            turn = TrainerTurn(self.rules, self.bounds.habits, state, number)
            yield from _labelled(f"trainer {'ABC'[number]}", turn.steps())

    def _days(self, state: State) -> Iterator[tuple[str, State]]:
        taken = {found.directory for found in state.checkpoints}
        for offer in state.offers if state.days else ():
            if not offer.old and offer.directory not in taken:
                old = state.with_offer(offer._replace(old=True))
                yield f"{offer.directory} is old", old._replace(days=state.days - 1)

    def _damages(self, state: State) -> Iterator[tuple[str, State]]:
        """Lose a file of a form that nobody relies on yet: who drops the chain does it because the form is whole."""
        is_relied_on = any(trainer.todo for trainer in state.trainers)
        for form in state.counting if state.damages and not is_relied_on else ():
            offer = state.offer(form.directory)
            others = View(self.rules, [found for found in state.counting if found is not form], state.offers)
            if offer is not None and offer.first and others.chain(form.form_of):
                torn = state.with_offer(offer._replace(first=""))
                yield f"loses a file of {form.directory}", torn._replace(damages=state.damages - 1)

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
            known = found.place[0] >= epoch or found.save_id in committed or found.form_of in committed
            if found.form_of and not known:
                raise Lost(f"the form {found.save_id} brings back {found.form_of}, which does not count")

    def _check_readers(self, state: State, counting: list[Checkpoint], when: str) -> None:
        for found, what in View(self.rules, counting, state.offers).damaged():
            raise Lost(f"{found.save_id}: {what}{when}")
        newest = max((found.place for found in counting), default=(0, 0))
        if newest < state.acknowledged:
            raise Lost(f"{state.acknowledged} was acknowledged, and readers get {newest}{when}")


def _labelled(who: str, steps: Iterator[tuple[str, State]]) -> Iterator[tuple[str, Iterator[State]]]:
    for label, after in steps:
        yield f"{who} {label}", iter((after,))
