"""How saves go in the model: near ones piece by piece, durable ones up to rotation."""

from __future__ import annotations

from faults.near_states import UP, E, name
from faults.near_views import NearViews


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
        elif phase == "ack":
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
