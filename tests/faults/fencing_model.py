"""The protocol of fencing (docs/format.md) as a model of which all states are visited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from faults.all_states import Lost, all_states

NO_STEP = 0  # in place of one, of an id that has none
_TRIES = 9  # more names than a writer needs


class Attempt(NamedTuple):
    """One try at a checkpoint: ``n`` tells those of one writer apart."""

    epoch: int
    n: int
    step: int


class Manifest(NamedTuple):
    """What makes an attempt count."""

    attempt: Attempt
    seq: int


class Dir(NamedTuple):
    """What lies in a directory, each by the attempt that put it there."""

    intent: Attempt | None = None
    data: Attempt | None = None
    manifest: Manifest | None = None


class Name(NamedTuple):
    """``<step>``, ``<step>.<epoch>`` or ``<step>.<epoch>.<n>``."""

    step: int
    epoch: int = 0
    n: int = 0


class Takeover(NamedTuple):
    """The list that a writer publishes."""

    epoch: int = 0
    committed: frozenset[Attempt] = frozenset()
    highest_step: int = -1


class Writer(NamedTuple):
    """A process: where it is, and what it remembers."""

    saves: int  # that it may still begin
    at: str = "look_for_claims"
    epoch: int = 0
    found: frozenset[Attempt] = frozenset()  # by its listing at the takeover
    highest_step: int = -1
    step: int = 0
    seq: int = 0
    name: Name | None = None
    todo: tuple[Name, ...] = ()  # directories that it is about to remove
    then: str = ""  # where it goes on when they are removed
    looked: Dir | None = None  # what it saw in the first of them


class State(NamedTuple):
    """The output dir, its writers, and the newest checkpoint that was acknowledged as (epoch, seq)."""

    claims: frozenset[tuple[int, int]]  # those that are there: number, and whose
    takeover: Takeover
    dirs: tuple[tuple[Name, Dir], ...]
    writers: tuple[Writer, ...]
    acknowledged: tuple[int, int] = (0, 0)
    failures: int = 0  # that may still come
    before: int = 0  # the number above which writers claim
    published: frozenset[int] = frozenset()  # epochs that some writer has taken over as


class Turn:
    """A state in which it is one writer's turn."""

    def __init__(self, state: State, number: int) -> None:
        self.state, self.number = state, number
        self.writer, self.dirs = state.writers[number], dict(state.dirs)
        self.epoch = self.writer.epoch

    @property
    def highest(self) -> int:
        """The highest number that is taken, as far as files say."""
        return max([self.state.before, *(epoch for epoch, _ in self.state.claims)])

    @property
    def older_claims(self) -> frozenset[tuple[int, int]]:
        """The claims that a takeover removes."""
        return frozenset(claim for claim in self.state.claims if claim[0] < self.epoch)

    @property
    def is_there(self) -> bool:
        """Whether a look at the own claim passes."""
        return (self.epoch, self.number) in self.state.claims

    @property
    def owns(self) -> bool:
        """Whether a thorough fence check passes."""
        return self.is_there and self.highest <= self.epoch

    @property
    def attempt(self) -> Attempt:
        """What the writer is trying."""
        return Attempt(self.epoch, self.writer.saves, self.writer.step)

    @property
    def held(self) -> Dir | None:
        """What is in the directory that the writer writes."""
        assert self.writer.name is not None
        return self.dirs.get(self.writer.name)

    def go(self, at: str, **changes: Any) -> State:
        """Return the state after a step; changes are of the writer, or of the state where it has the field."""
        dirs = changes.pop("dirs", None)
        of_state = {name: changes.pop(name) for name in State._fields if name in changes}
        if dirs is not None:
            of_state["dirs"] = tuple(sorted((name, held) for name, held in dirs.items() if held is not None))
        if at == "idle" and not self.writer.saves:
            at = "stopped"
        if at == "idle":  # what it need not remember must not make states differ
            changes = {"seq": 0, "name": None, "todo": (), "then": "", "looked": None, **changes}
        elif at == "stopped":
            changes = Writer(0)._asdict()
        writer = self.writer._replace(**{**changes, "at": at})
        writers = (*self.state.writers[: self.number], writer, *self.state.writers[self.number + 1 :])
        return self.state._replace(writers=writers, **of_state)

    def checked(self, at: str, *, is_thorough: bool = False, **changes: Any) -> State:
        """Return the state after a fence check, which looks for others' claims where it is thorough."""
        passes = self.owns if is_thorough else self.is_there
        return self.go(at, **changes) if passes else self.go("stopped")

    def put(self, at: str, **files: Any) -> State:
        """Return the state in which files are in the directory that the writer writes."""
        held = self.held or Dir()
        if held.intent is not None and held.intent.epoch > self.epoch:
            raise Lost(f"{self.attempt} writes {set(files)} into {self.writer.name}, which is that of {held.intent}")
        return self.go(at, dirs={**self.dirs, self.writer.name: held._replace(**files)})

    def remove(self, at: str, file: str) -> State:
        """Return the state without a file of the directory that the writer removes."""
        name = self.writer.todo[0]
        held = self.dirs.get(name, Dir())
        found = getattr(held, file)
        owner = found.attempt if isinstance(found, Manifest) else found
        if owner is not None and owner.epoch > self.epoch:
            raise Lost(f"writer {self.epoch} removes {file} of {name}, which is that of {owner}")
        left = held._replace(**{file: None})
        return self.go(at, dirs={**self.dirs, name: None if left == Dir() else left})


@dataclass(frozen=True)
class Rules:
    """The protocol. Without any one of its rules something is lost, or it would not be needed.

    ``objects`` is no rule but the kind of storage: a file of an object store takes the place of an older one, and
    directories come and go with their files.
    """

    objects: bool = False
    claim_above_lists: bool = True
    look_after_claim: bool = True
    claim_before_list: bool = True
    claims_go_first: bool = True
    lists_go_last: bool = True
    list_before_sweep: bool = True
    check_before_sweep: bool = True
    hand_on_steps: bool = True
    sweep_dead_epochs_only: bool = True
    tidy_own_epoch_only: bool = True
    names_not_reused: bool = True
    no_step_is_not_fresh: bool = True
    check_after_intent: bool = True
    check_after_commit: bool = True
    check_before_removal: bool = True
    readers_know_epochs: bool = True
    order_by_seq: bool = True


@dataclass(frozen=True)
class Model:
    """Writers that take over one after the other, save, roll back, fail, and stand still anywhere.

    Args:
        rules: what they keep to.
        scripts: the steps that each saves; it may have restored any before.
        failures: how many saves may fail in all, with an error that their writer survives.
        orphan: the number of a list that is there, of which the claim is gone.
    """

    rules: Rules
    scripts: tuple[tuple[int, ...], ...]
    failures: int = 0
    orphan: int = 0

    def check(self) -> int:
        """Go through all states, those of the fewest steps first, and return how many there are.

        Raises:
            Lost: in one of them something is lost.
        """
        writers = tuple(Writer(len(steps)) for steps in self.scripts)
        before = self.orphan if self.rules.claim_above_lists else 0
        takeover = Takeover(self.orphan)
        start = State(frozenset(), takeover, (), writers, failures=self.failures, before=before)
        return all_states(start, self._steps, self._check_readers)

    def _steps(self, state: State) -> Iterator[tuple[str, Iterator[State]]]:
        for number in self._who(state):
            at = state.writers[number].at
            yield f"{number + 1}: {at}", getattr(self, f"_{at}")(Turn(state, number))

    def _who(self, state: State) -> list[int]:
        """Return whose steps are tried: of a step that touches nothing, and that nothing touches, the order is free."""
        thorough = {"hold", "idle"} | ({"acknowledge"} if self.rules.check_after_commit else set())
        for number, writer in enumerate(state.writers):
            is_fenced = writer.at in thorough and not Turn(state, number).owns
            if writer.at == "next" or is_fenced or (writer.at == "verify" and not Turn(state, number).is_there):
                return [number]
        return [number for number, writer in enumerate(state.writers) if writer.at != "stopped"]

    def visible(self, state: State) -> list[tuple[Name, Manifest]]:
        """Return what readers count, oldest first."""
        counted = state.takeover.committed
        since = state.takeover.epoch if self.rules.readers_know_epochs else 0
        found = [(name, held.manifest) for name, held in state.dirs if held.manifest]
        return sorted(
            [(name, m) for name, m in found if m.attempt.epoch >= since or m.attempt in counted],
            key=lambda item: self._order(item[1]),
        )

    def _order(self, manifest: Manifest) -> tuple[int, int]:
        return manifest.attempt.epoch if self.rules.order_by_seq else manifest.attempt.step, manifest.seq

    def _check_readers(self, state: State) -> None:
        visible, dirs = self.visible(state), dict(state.dirs)
        for name, manifest in visible:
            if dirs[name].data != manifest.attempt:
                raise Lost(f"{manifest.attempt} in {name} counts, and its data is {dirs[name].data}")
        found = (visible[-1][1].attempt.epoch, visible[-1][1].seq) if visible else (0, 0)
        if found < state.acknowledged:
            raise Lost(f"(epoch, seq) {state.acknowledged} was acknowledged, and readers get {found}")

    # taking over

    def _look_for_claims(self, turn: Turn) -> Iterator[State]:
        """Writers begin in their order, and go on in any."""
        if turn.number and turn.state.writers[turn.number - 1].at == "look_for_claims":
            return
        if self.rules.claim_before_list:
            yield turn.go("claim", epoch=turn.highest + 1)
        else:
            yield turn.go("list", epoch=turn.state.before + turn.number + 1)

    def _claim(self, turn: Turn) -> Iterator[State]:
        if turn.epoch in dict(turn.state.claims):
            yield turn.go("claim", epoch=turn.highest + 1)
        else:
            at = "look_again" if self.rules.look_after_claim else "remove_claims"
            yield turn.go(at, claims=turn.state.claims | {(turn.epoch, turn.number)})

    def _look_again(self, turn: Turn) -> Iterator[State]:
        yield turn.go("stopped" if turn.highest > turn.epoch else "remove_claims")

    def _remove_claims(self, turn: Turn) -> Iterator[State]:
        older = sorted(turn.older_claims)
        if older and self.rules.claims_go_first:
            yield turn.go("remove_claims", claims=turn.state.claims - {older[0]})
        elif self.rules.lists_go_last:
            yield turn.go("list")
        else:
            yield turn.go("list", takeover=Takeover())

    def _list(self, turn: Turn) -> Iterator[State]:
        found = frozenset(manifest.attempt for _, manifest in self.visible(turn.state))
        yield turn.go("look_for_leftovers", found=found)

    def _look_for_leftovers(self, turn: Turn) -> Iterator[State]:
        left = _leftovers(turn.state, turn.epoch - 1 if self.rules.sweep_dead_epochs_only else self._highest(turn))
        left += tuple(name for name, held in turn.dirs.items() if held == Dir())  # no later writer has made them
        steps = [name.step for name in turn.dirs]
        if self.rules.hand_on_steps:
            steps.append(turn.state.takeover.highest_step)
        at = "publish" if self.rules.list_before_sweep else "next"
        yield turn.go(at, todo=left, then="idle" if at == "publish" else "publish", highest_step=max(steps, default=-1))

    def _publish(self, turn: Turn) -> Iterator[State]:
        if turn.epoch in turn.state.published:
            raise Lost(f"epoch {turn.epoch} is that of two writers")
        own = Takeover(turn.epoch, turn.writer.found, turn.writer.highest_step)
        claims = (turn.state.claims | {(turn.epoch, turn.number)}) - turn.older_claims
        published = turn.state.published | {turn.epoch}
        last = max(turn.state.takeover, own, key=lambda takeover: takeover.epoch)
        at = "hold" if self.rules.check_before_sweep else "next"
        yield turn.go(at, takeover=last, claims=claims, published=published, found=frozenset(), then="idle")

    def _hold(self, turn: Turn) -> Iterator[State]:
        yield turn.checked("next", is_thorough=True)

    # saving

    def _idle(self, turn: Turn) -> Iterator[State]:
        if turn.writer.saves:
            step = self.scripts[turn.number][-turn.writer.saves]
            yield turn.checked("pick", is_thorough=True, step=step, saves=turn.writer.saves - 1)

    def _pick(self, turn: Turn) -> Iterator[State]:
        seq = 1 + max((held.manifest.seq for _, held in turn.state.dirs if held.manifest), default=0)
        yield turn.go("make_dir", seq=seq, name=next(name for name in self._names(turn) if name not in turn.dirs))

    def _names(self, turn: Turn) -> Iterator[Name]:
        """Yield the names for a directory, from the one that did not do."""
        step = turn.writer.step
        fresh = step > turn.writer.highest_step
        trusted = not self.rules.names_not_reused or (step == NO_STEP and not self.rules.no_step_is_not_fresh)
        names = [Name(step)] if fresh or trusted else []
        names += [Name(step, turn.epoch, n) for n in range(_TRIES)]
        last = turn.writer.name
        yield from names[names.index(last) + 1 if last in names else 0 :]

    def _make_dir(self, turn: Turn) -> Iterator[State]:
        if turn.held is not None:
            yield turn.go("make_dir", name=next(self._names(turn)))
        elif self.rules.objects:
            yield turn.go("write_intent")
        else:
            yield turn.put("write_intent")

    def _write_intent(self, turn: Turn) -> Iterator[State]:
        if turn.held is None and not self.rules.objects:
            if turn.owns:
                raise Lost(f"the directory of {turn.attempt} is removed, and nobody has taken over")
            yield turn.go("idle")  # removed meanwhile: the save has failed
        elif turn.held is not None and turn.held.intent is not None:
            yield turn.go("make_dir", name=next(self._names(turn)))
        else:
            yield turn.put("verify" if self.rules.check_after_intent else "write", intent=turn.attempt)

    def _verify(self, turn: Turn) -> Iterator[State]:
        yield turn.checked("write")

    def _write(self, turn: Turn) -> Iterator[State]:
        if turn.state.failures:
            yield turn.go("abandon", failures=turn.state.failures - 1)
        if turn.held is not None and turn.held.data is not None:
            yield turn.go("abandon")
        elif self.rules.objects:
            yield turn.go("upload")
        else:
            yield turn.put("agree", data=turn.attempt)

    def _upload(self, turn: Turn) -> Iterator[State]:
        yield turn.put("agree", data=turn.attempt)

    def _agree(self, turn: Turn) -> Iterator[State]:
        if turn.held is None or turn.held.data is None:
            yield turn.go("abandon")
        else:
            yield turn.checked("commit")

    def _commit(self, turn: Turn) -> Iterator[State]:
        if (turn.held is None and not self.rules.objects) or (turn.held is not None and turn.held.manifest is not None):
            yield turn.go("abandon")
            return
        after = turn.put("acknowledge", manifest=Manifest(turn.attempt, turn.writer.seq))
        last = max(turn.state.published)
        if last > turn.epoch and turn.attempt in [m.attempt for _, m in self.visible(after)]:
            raise Lost(f"{turn.attempt} counts, though epoch {last} had taken over")
        yield after

    def _acknowledge(self, turn: Turn) -> Iterator[State]:
        if self.rules.check_after_commit and not turn.owns:
            yield turn.go("stopped")
            return
        order = turn.epoch, turn.writer.seq
        if order <= turn.state.acknowledged:
            raise Lost(f"(epoch, seq) {order} is acknowledged after {turn.state.acknowledged}")
        yield turn.go("rotate", acknowledged=order)

    def _abandon(self, turn: Turn) -> Iterator[State]:
        writes_data = turn.held is not None and turn.held.data is not None and turn.held.manifest is None
        name = (turn.writer.name,)
        yield turn.go("abandon_data", todo=name) if writes_data else turn.go("idle")

    def _abandon_data(self, turn: Turn) -> Iterator[State]:
        yield turn.remove("idle", "data")

    # rotating and sweeping

    def _rotate(self, turn: Turn) -> Iterator[State]:
        victims = tuple(name for name, _ in self.visible(turn.state)[:-1])  # max_keep=1
        yield turn.go("next_victim", todo=victims)

    def _next_victim(self, turn: Turn) -> Iterator[State]:
        if not turn.writer.todo:
            yield turn.go("tidy")
        elif self.rules.check_before_removal:
            yield turn.checked("remove_manifest", then="next_victim")
        else:
            yield turn.go("remove_manifest", then="next_victim")

    def _remove_manifest(self, turn: Turn) -> Iterator[State]:
        yield turn.remove("look", "manifest")

    def _tidy(self, turn: Turn) -> Iterator[State]:
        left = _leftovers(turn.state, turn.epoch if self.rules.sweep_dead_epochs_only else self._highest(turn))
        if self.rules.tidy_own_epoch_only and self.rules.sweep_dead_epochs_only:
            left = tuple(name for name in left if (intent := turn.dirs[name].intent) and intent.epoch == turn.epoch)
        yield turn.go("next", todo=left, then="idle")

    def _highest(self, turn: Turn) -> int:
        return turn.highest

    def _next(self, turn: Turn) -> Iterator[State]:
        yield turn.go("look" if turn.writer.todo else turn.writer.then)

    def _look(self, turn: Turn) -> Iterator[State]:
        yield turn.go("remove_data", looked=turn.dirs.get(turn.writer.todo[0], Dir()))

    def _remove_data(self, turn: Turn) -> Iterator[State]:
        seen = turn.writer.looked
        yield turn.remove("remove_intent", "data") if seen and seen.data else turn.go("remove_intent")

    def _remove_intent(self, turn: Turn) -> Iterator[State]:
        """And the directory: whoever comes between the two finds it taken, as it is before."""
        then = turn.writer.then
        done = {"todo": turn.writer.todo[1:], "looked": None}
        at = then if then == "next_victim" else "next"
        seen = turn.writer.looked
        is_empty = seen == Dir() == turn.dirs.get(turn.writer.todo[0])
        after = turn.remove(at, "intent") if is_empty or (seen and seen.intent) else turn.go(at)
        yield Turn(after, turn.number).go(at, **done)

    def _stopped(self, turn: Turn) -> Iterator[State]:
        yield from ()


def _leftovers(state: State, epoch: int) -> tuple[Name, ...]:
    return tuple(n for n, held in state.dirs if held.intent and held.intent.epoch <= epoch and not held.manifest)
