"""A model of two or three writers on one output dir, in steps as small as those that others can come between.

It says of the commit protocol what fence.py, commit.py and rotation.py of recckpt/output_dir and save.py do, and what
must hold in every state. A writer that stands still for ever is a dead one, so deaths need no step of their own;
readers look at every state. Left out: damage, pins, the index file (a hint), and all but one file of each checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from faults.all_states import Lost, all_states
from faults.fencing_states import NO_STEP, Dir, Manifest, Name, State, Takeover, Turn, Writer

_TRIES = 9  # more names than a writer needs


@dataclass(frozen=True)
class Rules:
    """The protocol. Without any one of its rules something is lost, or it would not be needed.

    ``objects`` is no rule but the kind of storage: a file of an object store takes the place of an older one, and
    directories come and go with their files.
    """

    objects: bool = False
    claim_above_lists: bool = True
    claim_before_list: bool = True
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
        start = State(before, Takeover(self.orphan), (), writers, failures=self.failures, before=before)
        return all_states(start, self._steps, self._check_readers)

    def _steps(self, state: State) -> Iterator[tuple[str, Iterator[State]]]:
        for number in self._who(state):
            at = state.writers[number].at
            yield f"{number + 1}: {at}", getattr(self, f"_{at}")(Turn(state, number))

    def _who(self, state: State) -> list[int]:
        """Return whose steps are tried: of a step that touches nothing, and that nothing touches, the order is free."""
        checks = {"hold", "verify", "idle"}
        checks |= {"acknowledge"} if self.rules.check_after_commit else set()
        for number, writer in enumerate(state.writers):
            if writer.at == "next" or (writer.at in checks and state.claims > state.before + number + 1):
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

    def _claim(self, turn: Turn) -> Iterator[State]:
        if turn.state.claims == turn.epoch - 1:
            yield turn.go("list", claims=turn.epoch if self.rules.claim_before_list else turn.state.claims)

    def _list(self, turn: Turn) -> Iterator[State]:
        found = frozenset(manifest.attempt for _, manifest in self.visible(turn.state))
        yield turn.go("look_for_leftovers", found=found)

    def _look_for_leftovers(self, turn: Turn) -> Iterator[State]:
        left = _leftovers(turn.state, turn.epoch - 1 if self.rules.sweep_dead_epochs_only else self._highest(turn))
        steps = [name.step for name in turn.dirs]
        if self.rules.hand_on_steps:
            steps.append(turn.state.takeover.highest_step)
        at = "publish" if self.rules.list_before_sweep else "next"
        yield turn.go(at, todo=left, then="idle" if at == "publish" else "publish", highest_step=max(steps, default=-1))

    def _publish(self, turn: Turn) -> Iterator[State]:
        own = Takeover(turn.epoch, turn.writer.found, turn.writer.highest_step)
        last = max(turn.state.takeover, own, key=lambda takeover: takeover.epoch)
        at = "hold" if self.rules.check_before_sweep else "next"
        yield turn.go(at, takeover=last, claims=max(turn.state.claims, turn.epoch), found=frozenset(), then="idle")

    def _hold(self, turn: Turn) -> Iterator[State]:
        yield turn.checked("next")

    # saving

    def _idle(self, turn: Turn) -> Iterator[State]:
        if turn.writer.saves:
            step = self.scripts[turn.number][-turn.writer.saves]
            yield turn.checked("pick", step=step, saves=turn.writer.saves - 1)

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
        if turn.state.takeover.epoch > turn.epoch and turn.attempt in [m.attempt for _, m in self.visible(after)]:
            raise Lost(f"{turn.attempt} counts, though epoch {turn.state.takeover.epoch} had taken over")
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
        return turn.state.before + len(self.scripts)

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
        after = turn.remove(at, "intent") if seen and seen.intent else turn.go(at)
        yield Turn(after, turn.number).go(at, **done)

    def _stopped(self, turn: Turn) -> Iterator[State]:
        yield from ()


def _leftovers(state: State, epoch: int) -> tuple[Name, ...]:
    return tuple(n for n, held in state.dirs if held.intent and held.intent.epoch <= epoch and not held.manifest)
