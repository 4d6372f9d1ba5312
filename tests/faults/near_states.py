"""The states of the model of near saves, its rules, and what its ranks see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from faults.all_states import Lost

UP, OFF, DOWN = 0, 1, 2
E = frozenset()


@dataclass(frozen=True)
class Rules:
    # what a piece is
    identity: bool = True  # pieces belong together by (run, epoch, cut); without: by step, as file names of others do
    run_identity: bool = True  # pieces of a run in another output dir do not count
    base_by_save_id: bool = True  # the base is found by its save id; without: by its ckpt_id
    parent_is_name: bool = True  # and by its name, not by that of what was compacted of it
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
    forget_in_new_epoch: bool = True  # a run that forgets ends it with a claim and a list of its own
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
    aways: int  # how often the store may be away from a near save


STOPPED = Trainer("stopped", 0, 0, (), "", E, E, None, 0, 0, 0, 0, 0, 0, 0, (), (), (), E, (), ())


def name(x):
    return f"n{x.epoch}.{x.cut}" if isinstance(x, Near) else x.sid


class NearViews:
    """What a restore by all ranks would take."""

    def __init__(
        self,
        rules,
        *,
        hosts=2,
        copies=1,
        a=(2, 1),
        b=(1, 0),
        backs=0,
        forgets=0,
        tool="",
        x=False,
        losses=0,
        offs=0,
        evicts=0,
        flips=0,
        wire=0,
        adopts=0,
        aways=0,
        other_run=False,
        limit=400_000,
        overlap=True,
    ):
        self.r, self.copies, self.limit, self.x, self.overlap, self.adopts = rules, copies, limit, x, overlap, adopts
        c1 = Ck("C1", "C1", 1, 0, 0, frozenset("c"), frozenset("c"), "d", 1)
        world = tuple(range(hosts))
        t = Trainer(
            "idle", 1, 0, world, "C1", frozenset("c"), E, None, 0, 0, *a, backs, forgets, 0, (), (), (), E, (), ()
        )
        u = t._replace(
            pc="look" if sum(b) else "stopped", epoch=0, base="", live=E, nears=b[0], durs=b[1], backs=0, forgets=0
        )
        dirs = [Host(UP, E, E) for _ in world]
        if other_run:  # of a copy of this output dir, on the same hosts
            alien = Near("other", 1, 9, 9, "C1", frozenset("o"), frozenset("co"), world, False, 9)
            dirs = [
                Host(UP, frozenset({(alien, h, True), (alien, (h - 1) % hosts, True)}), frozenset({alien}))
                for h in world
            ]
        self.start = St(
            1,
            (1, E, E, 1),
            frozenset({c1}),
            tuple(dirs),
            t,
            u,
            (tool or "done", 0),
            0,
            False,
            (1, 0),
            (1, 0),
            (),
            0,
            0,
            E,
            losses,
            offs,
            evicts,
            flips,
            wire,
            adopts,
            aways,
        )

    @staticmethod
    def counting(top, cks):
        return [c for c in cks if c.by >= top[0] or c.sid in top[1]]

    def near_counts(self, top, n):
        if n.run and self.r.run_identity:
            return False
        return not self.r.epoch_rule or n.epoch >= top[3] or self.key(n) in top[2]

    def key(self, n):  # what a name on disk tells
        return (n.run, n.epoch, n.cut)

    def base_of(self, cks, name):
        for c in cks:
            if not self.r.parent_is_name and "/" in name:
                sid, rep = name.split("/")
                if c.sid == sid and rep in c.reps:
                    return c
            elif (c.sid if self.r.base_by_save_id else c.cid) == name:
                return c
        return None

    def base_name(self, cks, sid):
        c = next((c for c in cks if c.sid == sid), None)
        if c is None:
            return sid
        if not self.r.parent_is_name:
            return sid + "/" + c.reps[0]
        return c.sid if self.r.base_by_save_id else c.cid

    def order(self, x):
        return (x.epoch, x.cut) if self.r.order_by_cut else (x.step,)

    def nears_on(self, hosts):
        return {n for h in hosts if h.state == UP for n in h.seals}

    def find(self, hosts, n, shard, checked):
        """Return the record of a piece that readers take for this shard of n, or None."""
        best = None
        for h in hosts:
            if h.state != UP:
                continue
            for m, s, good in h.pieces:
                same = (
                    self.key(m) == self.key(n) if self.r.identity else m.step == n.step and len(m.hosts) == len(n.hosts)
                )
                is_it = s == shard and same and (good or not checked)
                if is_it and (best is None or (not good, m != n) > (not best[1], best[0] != n)):  # the worst there is
                    best = (m, good)
        return best

    def choose(self, top, cks, hosts, checked, seen=None):
        """Return ("D", ck) | ("N", near, pieces) | None: what a restore by all ranks takes."""
        live = self.counting(top, cks)
        cands = [(self.order(c), 0, c) for c in live]
        for n in self.nears_on(hosts):
            if seen is not None and n not in seen:
                continue
            if self.near_counts(top, n) and self.base_of(live, n.base):
                cands.append((self.order(n), 1, n))
        key = (lambda x: (x[1], x[0])) if not self.r.one_order else (lambda x: (x[0], x[1]))
        own = {}
        for _, is_near, x in sorted(cands, key=key, reverse=True):
            if not is_near:
                return ("D", x, own) if own else ("D", x)
            pieces = [self.find(hosts, x, s, checked) for s in range(len(x.hosts))]
            if not self.r.one_choice:  # each rank takes the newest that is well where it looks
                for s, p in enumerate(pieces):
                    if p and s not in own:
                        own[s] = (x, p)
                if len({y[0] for y in own.values()}) > 1:
                    raise Lost("I6: ranks restore different saves")
                if len(own) < len(x.hosts):
                    continue
            if all(pieces) or (not self.r.all_pieces and any(pieces)):
                return ("N", x, tuple(pieces))
        return None

    def content(self, top, cks, got):
        """Check and return what comes out of a choice."""
        if got[0] == "D":
            if len(got) > 2:
                raise Lost("I6: some ranks restore a near save, others a checkpoint")
            if got[1].load != got[1].truth:
                raise Lost(f"I1: checkpoint {got[1].sid} gives {sorted(got[1].load)}, was {sorted(got[1].truth)}")
            return got[1].load
        _, n, pieces = got
        base = self.base_of(self.counting(top, cks), n.base)
        if base is None:
            raise Lost(f"I4: {name(n)} has no base")
        if n.run:
            raise Lost("I2: the state of another run")
        if n.late:
            raise Lost(f"I2: {name(n)} was sealed by a writer that had been overtaken")
        for p in pieces:
            if p is None:
                raise Lost(f"I1: {name(n)} lacks a piece, whose rows are those of the base")
            if not p[1]:
                if self.r.check_at_read:
                    raise Lost(f"I6: {name(n)} was chosen and a piece of it is damaged: no restore")
                raise Lost(f"I1: a damaged piece of {name(n)} is restored")
            if p[0] != n and (p[0].truth != n.truth or p[0].base != n.base):
                raise Lost(f"I1: pieces of {name(n)} and {name(p[0])} in one restore")
            if base.load | p[0].load != n.truth:
                raise Lost(f"I1: {name(n)} gives {sorted(base.load | p[0].load)}, was {sorted(n.truth)}")
        return n.truth

    def check(self, st):
        for c in st.cks:
            if c.load != c.truth:
                raise Lost(f"I1: checkpoint {c.sid} holds {sorted(c.load)}, was {sorted(c.truth)}")
        got = self.choose(st.top, st.cks, st.hosts, self.r.verify_before_choice)
        if got is None:
            raise Lost("I6: nothing can be restored")
        rows = self.content(st.top, st.cks, got)
        order = (got[1].epoch, got[1].cut)
        what = name(got[1]) if got[0] == "N" else got[1].sid
        if st.gone and "X" in rows:
            raise Lost(f"I5: {what} gives the forgotten id back")
        if order < st.acked_d:
            raise Lost(f"I3: restores {what}, the checkpoint {st.acked_d} was acknowledged")
        if st.faults <= self.copies and order < st.acked:
            raise Lost(f"I3: restores {what}, the save {st.acked} was acknowledged, {st.faults} faults")
        if (
            got[0] == "N"
            and st.faults <= self.copies
            and order == st.acked
            and st.last
            and st.last[-1][0] == order
            and got[1] != st.last[-1][1]
        ):
            raise Lost(f"I1: restores another {what} than was acknowledged")
        if not st.host_faults and len(st.hit) == 1:
            before = [o for o, n in st.last if n not in st.hit]
            if before and order < max(before):
                raise Lost(f"I3: restores {what}, {max(before)} before the damaged generation was acknowledged")

    def there(self, st, n):
        return n in self.nears_on(st.hosts) and all(self.find(st.hosts, n, s, False) for s in range(len(n.hosts)))

    def complete(self, st):
        """Names of near saves that a takeover finds whole, by their names."""
        live = self.counting(st.top, st.cks)
        return frozenset(
            self.key(n)
            for n in self.nears_on(st.hosts)
            if self.near_counts(st.top, n) and self.base_of(live, n.base) and self.there(st, n)
        )
