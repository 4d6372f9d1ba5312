"""What trainers with near saves do in the model, and the other writers beside them."""

from __future__ import annotations

from faults.all_states import Lost
from faults.near_states import STOPPED, UP, Ck, E, Near, NearViews, name


class SaveSteps(NearViews):
    """The steps of the saves under way."""

    def near(self, st, who, t, go, owns, up):
        phase, n, done = t.nj
        shards, r = len(n.hosts), self.r
        copies = self.copies if shards > 1 else 0
        ahead = lambda st, phase=phase, done=done, n=n, **kw: go(st, nj=(phase, n, done), **kw)  # noqa: E731

        def on(st, h, **kw):
            return st._replace(hosts=(*st.hosts[:h], st.hosts[h]._replace(**kw), *st.hosts[h + 1 :]))

        if phase == "write":
            for h in n.hosts:  # before it writes: what died there would take its room
                host = st.hosts[h]
                void = {m for m, *_ in host.pieces if m.epoch < t.epoch and not m.run and self.key(m) not in t.named}
                if void and not done and host.state == UP:
                    left = frozenset(p for p in host.pieces if p[0] not in void)
                    yield (
                        f"host {h} removes what does not count",
                        ahead(on(st, h, pieces=left, seals=host.seals - void)),
                    )
            for s in range(shards):
                h, to = n.hosts[s], n.hosts[(s + 1) % shards]
                if ("p", s) not in done and st.hosts[h].state == UP:
                    have = st.hosts[h].pieces
                    if not r.never_overwrite:
                        have = frozenset(p for p in have if p[0].epoch != n.epoch or p[0] == n)
                    yield (
                        f"host {h} writes piece {s} of {name(n)}",
                        ahead(on(st, h, pieces=have | {(n, s, True)}), done=done | {("p", s)}),
                    )
                if (
                    copies
                    and ("p", s) in done
                    and ("c", s) not in done
                    and st.hosts[h].state == UP == st.hosts[to].state
                ):
                    good = (n, s, True) in st.hosts[h].pieces
                    if not good and not any(x[0] == n and x[1] == s for x in st.hosts[h].pieces):
                        yield f"host {h} has lost piece {s}: the save fails", go(nj=())
                        continue
                    bad = [(True, st)] + ([(False, st._replace(wire=st.wire - 1))] if st.wire and good else [])
                    for fine, st2 in bad:
                        if not (fine and good) and r.copy_checked:
                            yield f"host {to} refuses a spoiled copy of {s}: the save fails", go(st2, nj=())
                            continue
                        have = st2.hosts[to].pieces
                        yield (
                            f"host {to} takes {'a' if fine else 'a spoiled'} copy of piece {s} of {name(n)}",
                            ahead(on(st2, to, pieces=have | {(n, s, fine and good)}), done=done | {("c", s)}),
                        )
            need = {("p", s) for s in range(shards)} | (
                {("c", s) for s in range(shards)} if copies and r.copies_before_ack else set()
            )
            early = not r.seal_after_all
            if (need <= done or (early and {x for x in need if x[0] == "p"} & done)) and up:
                if st.aways:
                    yield self.away(st, n, ahead)
                if r.check_before_seal and not owns:
                    yield "fenced", go(pc="stopped")
                elif not early:
                    yield f"all have all pieces of {name(n)}", ahead(st, phase="seal", done=E)
                else:
                    for h in n.hosts:
                        if ("s", h) not in done:
                            yield self.seals(st, t, n, h, done, ahead, on, "write")
                    if need | {("s", h) for h in n.hosts} <= done:
                        yield "all have sealed", ahead(st, phase="ack", done=E)
        elif phase == "seal":
            for h in n.hosts:
                if h not in done and st.hosts[h].state == UP:
                    yield self.seals(st, t, n, h, done, ahead, on, "seal")
            if set(n.hosts) <= done and up:
                yield "all have sealed", ahead(st, phase="ack", done=E)
        elif phase == "undo":
            left = [h for h in n.hosts if st.hosts[h].state == UP and self.has(st.hosts[h], n)]
            for h in left:
                pieces = frozenset(p for p in st.hosts[h].pieces if p[0] != n)
                yield f"host {h} removes {name(n)}", on(st, h, pieces=pieces, seals=st.hosts[h].seals - {n})
            if not left:
                yield f"{name(n)} has failed", go(nj=())
        elif phase == "ack":
            if st.aways:
                yield self.away(st, n, ahead)
            if r.check_after_seal and not owns:
                yield "fenced", go(pc="stopped")
                return
            order = (n.epoch, n.cut)
            st2 = st._replace(acked=max(st.acked, order), last=(*st.last, (order, n))[-2:])
            yield f"acknowledges {name(n)}", ahead(st2, phase="gc", done=E, gens=(*t.gens, self.key(n)))
        elif phase == "gc":
            if r.gc_check and not owns:
                yield "fenced", go(pc="stopped")
                return
            keep = set(sorted({*t.gens, *t.named}, key=lambda k: k[1:])[-(2 if r.two_generations else 1) :])
            busy = False
            for h in n.hosts:
                host = st.hosts[h]
                if host.state != UP:
                    continue
                if r.gc_by_epoch:
                    goes = lambda m: not m.run and m.epoch <= t.epoch and self.key(m) not in keep  # noqa: E731
                else:
                    best = sorted({(m.cut, m.epoch) for m, _, _ in host.pieces})[-2:]
                    goes = lambda m: (m.cut, m.epoch) not in best  # noqa: B023, E731
                less = frozenset(p for p in host.pieces if not goes(p[0]))
                seals = frozenset(m for m in host.seals if not goes(m))
                if less != host.pieces or seals != host.seals:
                    busy = True
                    yield f"host {h} removes old generations", on(st, h, pieces=less, seals=seals)
            if not busy:
                yield "is done", go(nj=(), gens=t.gens[-2:])

    @staticmethod
    def has(host, n):
        return n in host.seals or any(p[0] == n for p in host.pieces)

    def away(self, st, n, ahead):
        """The fence cannot be checked: the near save fails on all ranks, sealed or not, and the next is to be made."""
        return f"the store is away, gives {name(n)} up", ahead(st._replace(aways=st.aways - 1), phase="undo", done=E)

    def seals(self, st, t, n, h, done, ahead, on, phase):
        first = not done if phase == "seal" else not any(x[0] == "s" for x in done)
        late = n.late or (first and st.top[3] > n.epoch)
        m = n._replace(late=late)
        if not self.r.staged_base:
            m = m._replace(base=self.base_name(st.cks, t.base) if t.base else n.base)
        if m != n:  # the record is one: in this model pieces hold it, too

            def swap(host):
                return host._replace(
                    pieces=frozenset((m if x == n else x, s, g) for x, s, g in host.pieces),
                    seals=frozenset(m if x == n else x for x in host.seals),
                )

            st = st._replace(hosts=tuple(swap(x) for x in st.hosts), hit=frozenset(m if x == n else x for x in st.hit))
        mark = ("s", h) if phase == "write" else h
        return (
            f"host {h} seals {name(n)}",
            ahead(on(st, h, seals=st.hosts[h].seals | {m}), phase=phase, done=done | {mark}, n=m),
        )

    def durable(self, st, who, t, go, owns):
        phase, ck, victims = t.dj
        if phase == "check":
            if not owns:
                yield "fenced", go(pc="stopped")
            elif t.base and not any(c.sid == t.base for c in st.cks):
                yield f"checkpoint {ck.sid} fails, its base is gone", go(dj=(), base="", marks2=None)
            else:
                yield f"checks for {ck.sid}", go(dj=("put", ck, ()))
        elif phase == "put":
            yield f"commits {ck.sid}", go(st._replace(cks=st.cks | {ck}), dj=("ack", ck, ()))
        elif phase == "ack":
            if not owns:
                yield "fenced", go(pc="stopped")
                return
            order = (ck.epoch, ck.cut)
            yield (
                f"acknowledges {ck.sid}",
                go(
                    st._replace(acked=max(st.acked, order), acked_d=max(st.acked_d, order)),
                    dj=("rotate", ck, ()),
                    base=ck.sid,
                    marks=t.marks2,
                    marks2=None,
                ),
            )
        elif phase == "rotate":
            if not owns:
                yield "fenced", go(pc="stopped")
                return
            live = self.counting(st.top, st.cks)
            newest = max(live, key=lambda c: (c.epoch, c.cut))
            keep = {newest.sid, t.base}
            if self.r.keep_near_base:
                wanted = {*t.gens[-2:], *t.named} | ({self.key(t.nj[1])} if t.nj else set())
                for n in self.nears_on(st.hosts) | ({t.nj[1]} if t.nj else set()):
                    if self.key(n) in wanted and (n.epoch, n.cut) > (newest.epoch, newest.cut):
                        found = self.base_of(live, n.base)
                        keep |= {found.sid} if found else set()
            out = tuple(sorted(c.sid for c in live if c.sid not in keep))
            yield f"rotates {'+'.join(out) or 'nothing'}", go(dj=("rm", ck, out) if out else ())
        elif phase == "rm":
            yield (
                f"removes {'+'.join(victims)}",
                go(st._replace(cks=frozenset(c for c in st.cks if c.sid not in victims)), dj=()),
            )


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
