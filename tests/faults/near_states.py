"""The states of the model of near saves: what lies where, what each trainer does, and the rules that may be dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

UP, OFF, DOWN = 0, 1, 2
E = frozenset()


@dataclass(frozen=True)
class Rules:
    # what a piece is
    identity: bool = True  # pieces belong together by (run, epoch, cut); without: by step, as file names of others do
    run_identity: bool = True  # pieces of a run in another output dir do not count
    base_by_save_id: bool = True  # the base is found by its save id; without: by its ckpt_id
    parent_is_origin: bool = True  # and by that of the checkpoint itself, not of the form that is there
    # the near save
    keeps_marks: bool = True  # a near save moves no base and drops no marks
    staged_base: bool = True  # it names the base of its staging; without: the base when it is sealed
    copy_checked: bool = True  # who receives a copy checks it before it says so
    copies_before_ack: bool = True
    seal_after_all: bool = True  # near.json only after all ranks have all pieces and copies
    check_before_seal: bool = True  # the fence, before near.json
    check_after_seal: bool = True  # and before the acknowledgement
    never_overwrite: bool = True  # a generation goes after a newer one is acknowledged, not when its room is wanted
    two_generations: bool = True
    gc_by_epoch: bool = True  # a writer removes its own epoch's and lower ones; without: all but the highest names
    gc_check: bool = True  # the fence, before removal
    # order
    order_by_cut: bool = True  # (epoch, cut); without: step
    one_order: bool = True  # near saves and checkpoints in one order; without: any near save before any checkpoint
    cut_is_unique: bool = True  # never used twice in an epoch; without: going back takes the counter back, too
    # takeover
    epoch_rule: bool = True  # near saves of epochs below the newest list count only if that names them
    list_names_near: bool = True  # the list of a takeover names the near saves that are complete
    claim_before_list: bool = True  # near dirs are listed after the claim
    tools_pass_near_on: bool = True  # who takes over without seeing near dirs lets count what counted
    takeover_before_near: bool = True  # no near save of an epoch without list
    base_newest_at_takeover: bool = True  # a restored base counts only if nothing in the own list is newer
    payload_is_marks: bool = True  # after a restore of a near save its rows are marked
    # rotation
    keep_near_base: bool = True  # rotation keeps the bases of near saves that are newer than the newest checkpoint
    # restore
    all_pieces: bool = True  # complete, or it does not count
    verify_before_choice: bool = True  # chosen after the bytes are checked; without: after names are listed
    one_choice: bool = True  # one choice for all ranks
    check_at_read: bool = True  # and the bytes that are used are checked again
    relist_when_gone: bool = True  # where a near save that was listed is gone before it was chosen, all list again
    list_read_last: bool = True  # the list of the output dir is read after the near dirs, as it is after the manifests
    # forget
    forget_names_none: bool = True  # the list of a forgetting names no near save
    forget_in_new_epoch: bool = True  # a run that forgets takes over from itself
    forget_fences_restored: bool = True  # who restored before a forgetting ended may not take over after it
    forget_ends_first: bool = True  # nobody restores while one is under way (who restores ends it before)


class Ck(NamedTuple):
    sid: str
    cid: str
    epoch: int
    cut: int
    step: int
    load: frozenset  # what its files give
    truth: frozenset  # what a full save would have held
    reps: str  # "d" itself, "f" a form of it
    by: int  # epoch of who committed it: a revision keeps its place and has a committer of its own


class Near(NamedTuple):  # the record in each of its pieces
    run: str
    epoch: int
    cut: int
    step: int
    base: str
    load: frozenset
    truth: frozenset
    hosts: tuple  # shard i is written on hosts[i], copied to the next
    late: bool  # sealed when a list of a higher epoch was there
    nth: int  # tells apart what an epoch has made, for the model's own eyes


class Host(NamedTuple):
    state: int
    pieces: frozenset  # of (near, shard, good)
    seals: frozenset  # of nears


class Trainer(NamedTuple):
    pc: str
    epoch: int
    view: int  # how many forgettings had ended when it looked
    world: tuple
    base: str
    live: frozenset
    marks: frozenset
    marks2: object  # since the durable save under way was staged, or None
    cut: int
    step: int
    nears: int  # how many it may still make
    durs: int
    backs: int
    forgets: int
    nth: int
    nj: tuple  # near save under way: (phase, Near, done)
    dj: tuple  # durable save under way: (phase, Ck, victims)
    gens: tuple  # own acknowledged near saves that are kept
    named: frozenset  # near saves in its list
    found: tuple
    pick: tuple


class St(NamedTuple):
    claims: int
    top: tuple  # newest list: (epoch, save ids, names of near saves, epoch whose near saves count unnamed)
    cks: frozenset
    hosts: tuple
    a: Trainer
    b: Trainer
    tool: tuple  # (pc, epoch)
    ended: int  # forgettings
    gone: bool  # X is forgotten
    acked: tuple  # newest acknowledged order
    acked_d: tuple  # of checkpoints
    last: tuple  # the last two acknowledged near saves, (order, Near)
    faults: int
    host_faults: int
    hit: frozenset  # near saves of which a piece was damaged
    losses: int
    offs: int
    evicts: int
    flips: int
    wire: int
    adopts: int


STOPPED = Trainer("stopped", 0, 0, (), "", E, E, None, 0, 0, 0, 0, 0, 0, 0, (), (), (), E, (), ())


def name(x):
    return f"n{x.epoch}.{x.cut}" if isinstance(x, Near) else x.sid
