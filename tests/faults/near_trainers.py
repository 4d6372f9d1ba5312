"""What trainers do in the model of near saves: look, restore, take over, begin saves, go back, forget."""

from __future__ import annotations

from faults.all_states import Lost
from faults.near_states import STOPPED, UP, Ck, E, Near, name
from faults.near_views import NearViews


class TrainerSteps(NearViews):
    """The steps of a trainer but for its saves."""

    @staticmethod
    def forgetting(st):
        return st.tool[0] in ("publish", "revise") or "forget" in (st.a.pc, st.b.pc)

    def forget_list(self, st, epoch):
        near = E if self.r.forget_names_none else self.complete(st)
        return (epoch, frozenset(c.sid for c in self.counting(st.top, st.cks)), near, epoch)

    def revised(self, st, epoch):
        return frozenset(
            c._replace(sid=c.sid + "'", by=epoch, load=c.load - {"X"}, truth=c.truth - {"X"}) if "X" in c.load else c
            for c in st.cks
        )

    def trainer(self, st, who, t):
        def go(st=st, **kw):
            if kw.get("pc") == "stopped":
                return st._replace(**{who: STOPPED})
            return st._replace(**{who: t._replace(**kw)})

        owns = st.claims == t.epoch
        up = all(st.hosts[h].state == UP for h in t.world)
        if t.pc == "look":
            world = tuple(h for h, host in enumerate(st.hosts) if host.state == UP)
            if world and not (self.r.forget_ends_first and self.forgetting(st)):
                seen = (
                    frozenset(n for n in self.nears_on(st.hosts) if self.there(st, n))
                    if self.r.list_read_last
                    else st.top
                )
                yield (
                    ("lists its near dirs" if self.r.list_read_last else "reads the list"),
                    go(pc="choose", world=world, view=st.ended, found=(seen, st.acked, st.acked_d)),
                )
        elif t.pc == "choose":
            if not up:
                return
            seen, acked, acked_d = t.found
            top = st.top if self.r.list_read_last else seen
            got = self.choose(
                top, st.cks, self.here(st, t), self.r.verify_before_choice, seen if self.r.list_read_last else None
            )
            if got is None:
                raise Lost("I6: nothing can be restored")
            if (
                self.r.list_read_last
                and self.r.relist_when_gone
                and any(
                    self.order(n) > self.order(got[1]) and self.near_counts(top, n) and not self.there(st, n)
                    for n in seen
                )
            ):
                yield "finds that others removed what it listed, lists again", go(pc="look", found=())
                return
            yield f"chooses {name(got[1])}", go(pc="read", pick=got, found=(top, acked, acked_d))
        elif t.pc == "read":
            if not up:
                return
            top, acked, acked_d = t.found
            got = t.pick
            live = self.counting(top, st.cks)
            if got[0] == "D":
                gone = got[1] not in live
            else:
                gone = not self.base_of(live, got[1].base)
                now = []
                for p in got[2]:  # the descriptors are held: what is removed is still read, what is flipped is flipped
                    bad = p and any((p[0], s, False) in h.pieces for s in range(3) for h in self.here(st, t))
                    now.append((p[0], p[1] and not bad) if p else None)
                if self.r.check_at_read and self.r.verify_before_choice and any(p and not p[1] for p in now):
                    gone = True
                got = ("N", got[1], tuple(now))
            if gone:
                yield "finds it gone or damaged, looks again", go(pc="look", pick=(), found=(), world=t.world)
                return
            rows = self.content(top, st.cks, got)
            x = got[1]
            if st.ended > t.view or self.forgetting(st):  # a forgetting takes near saves back
                acked = acked_d
            if (x.epoch, x.cut) < acked_d or (st.faults <= self.copies and (x.epoch, x.cut) < acked):
                raise Lost(f"I3: B restores {name(x)}, {acked} was acknowledged before it looked")
            base = self.base_of(live, x.base).sid if got[0] == "N" else x.sid
            marks = x.load if got[0] == "N" and self.r.payload_is_marks else E
            yield (
                f"restores {name(x)}",
                go(
                    pc="claim" if self.r.claim_before_list else "list",
                    live=rows,
                    base=base,
                    marks=marks,
                    step=x.step,
                    pick=(),
                    found=(),
                ),
            )
        elif t.pc == "claim":
            if self.r.forget_fences_restored and (st.ended > t.view or self.forgetting(st)):
                yield "fenced: ids are being forgotten since it restored", go(pc="stopped")
                return
            if not self.r.takeover_before_near:
                yield "claims, without a list", go(st._replace(claims=st.claims + 1), pc="idle", epoch=st.claims + 1)
                return
            yield (
                "claims",
                go(
                    st._replace(claims=st.claims + 1),
                    pc="list" if self.r.claim_before_list else "publish",
                    epoch=st.claims + 1,
                ),
            )
        elif t.pc == "list":
            live = self.counting(st.top, st.cks)
            near = self.complete(st) if self.r.list_names_near else E
            newest = max(live, key=lambda c: (c.epoch, c.cut)).sid
            yield (
                "lists",
                go(
                    pc="publish" if self.r.claim_before_list else "claim",
                    found=(frozenset(c.sid for c in live), near, newest),
                ),
            )
        elif t.pc == "publish":
            sids, near, _ = t.found
            yield (
                "publishes",
                go(
                    st._replace(top=max(st.top, (t.epoch, sids, near, t.epoch), key=lambda x: x[0])),
                    pc="hold",
                    named=near,
                ),
            )
        elif t.pc == "hold":
            if not owns:
                yield "fenced", go(pc="stopped")
                return
            base = t.base
            if self.r.base_newest_at_takeover and base != t.found[2]:
                base = ""
            if base and not any(c.sid == base for c in self.counting(st.top, st.cks)):
                base = ""
            yield "holds" + ("" if base else " (no base)"), go(pc="idle", base=base, found=())
        elif t.pc == "idle":
            yield from self.start_saves(st, who, t, go, owns, up)
            if t.nj:
                yield from self.near(st, who, t, go, owns, up)
            if t.dj:
                yield from self.durable(st, who, t, go, owns)

    def here(self, st, t):
        return tuple(h for i, h in enumerate(st.hosts) if i in t.world)

    def start_saves(self, st, who, t, go, owns, up):
        n = t.nth + 1
        label = "X" if self.x and who == "a" and t.nth == 0 and not st.gone else f"{who.upper()}{n}"
        live, marks = t.live | {label}, t.marks | {label}
        marks2 = None if t.marks2 is None else t.marks2 | {label}
        free = self.overlap or not (t.nj or t.dj)
        if t.nears and not t.nj and t.base and up and free:
            near = Near(
                "", t.epoch, t.cut + 1, t.step + 1, self.base_name(st.cks, t.base), marks, live, t.world, False, n
            )
            yield (
                f"stages near save {name(near)} (step {near.step}, on {t.base})",
                go(
                    nj=("write", near, E),
                    nears=t.nears - 1,
                    nth=n,
                    cut=t.cut + 1,
                    step=t.step + 1,
                    live=live,
                    marks=marks if self.r.keeps_marks else E,
                    marks2=marks2,
                ),
            )
        if t.durs and not t.dj and free:
            base = next((c for c in st.cks if c.sid == t.base), None)
            load = base.load | marks if base else live
            sid = f"{who.upper()}{n}"
            ck = Ck(sid, sid, t.epoch, t.cut + 1, t.step + 1, load, live, "d", t.epoch)
            yield (
                f"stages checkpoint {sid} (step {ck.step})",
                go(
                    dj=("check", ck, ()),
                    durs=t.durs - 1,
                    nth=n,
                    cut=t.cut + 1,
                    step=t.step + 1,
                    live=live,
                    marks=marks,
                    marks2=E,
                ),
            )
        idle = not t.nj and not t.dj
        if t.backs and idle and t.base:
            base = next((c for c in st.cks if c.sid == t.base), None)
            if base:
                yield (
                    f"goes back to {t.base}",
                    go(
                        backs=t.backs - 1,
                        live=base.load,
                        marks=E,
                        step=base.step,
                        cut=t.cut if self.r.cut_is_unique else base.cut,
                    ),
                )
        if t.forgets and idle and owns:
            if self.r.forget_in_new_epoch:
                epoch = st.claims + 1
                yield (
                    "claims anew, to forget",
                    go(st._replace(claims=epoch), epoch=epoch, forgets=t.forgets - 1, pc="forget"),
                )
            else:
                yield from self.forgets(st, who, t, go)
        if self.adopts and owns:
            for c in st.cks:
                if c.reps == "d" and st.adopts:
                    yield (
                        f"adopts a form of {c.sid}",
                        st._replace(adopts=st.adopts - 1, cks=st.cks - {c} | {c._replace(reps="df")}),
                    )
                elif c.reps == "df":
                    yield (
                        f"removes what the form of {c.sid} replaces",
                        st._replace(cks=st.cks - {c} | {c._replace(reps="f")}),
                    )

    def forgets(self, st, who, t, go):
        top = max(st.top, self.forget_list(st, t.epoch), key=lambda x: x[0]) if self.r.forget_in_new_epoch else st.top
        st2 = st._replace(
            top=top, cks=self.revised(st, t.epoch), gone=True, acked=st.acked_d, last=(), ended=st.ended + 1
        )
        yield "forgets X", go(st2, pc="idle", base="", live=t.live - {"X"}, marks=E, gens=(), named=E, forgets=0)
