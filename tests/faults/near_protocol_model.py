"""Near saves, peer copies and their restore: every state of a small world, breadth first, so a trace is a shortest one.

One output dir; writer A (epoch 1, base C1) and writer B (restores, takes over, saves), either of which may stand still
for ever (so deaths of processes need no step) or go on as a zombie; 2 or 3 hosts, each with a near dir; a bystander who
forgets ids. A near save is written piece by piece and copy by copy; hosts are lost, or go away and come back with their
old files; pieces are evicted, flipped, or spoiled on the wire. In every state an observer restores, with the hosts that
are up then. It knows copies on other hosts, which recckpt does not make yet:

I1 all pieces are of one save, and the content is what a full save of that moment would hold
I2 nothing of a fenced writer, nothing of another run
I3 never older than the newest acknowledged durable checkpoint; with at most `copies` faults never older than the newest
   acknowledged near save; with any damage to one generation never older than the one before
I4 its base is there   I5 no forgotten id comes back   I6 all ranks restore the same, and some restore is possible

Left out: chains and forms of the durable tier (delta_protocol_model.py), shards of the dense state, bits of a piece.
"""

from __future__ import annotations

from faults.all_states import Lost
from faults.near_states import DOWN, OFF, UP, E, Host, name
from faults.near_trainers import SaveSteps, TrainerSteps


class Tiers(TrainerSteps, SaveSteps):
    """One world, of which :meth:`run` looks at every state, breadth first, so that a trace is a shortest one."""

    def steps(self, st):
        for who in "ab":
            t = getattr(st, who)
            if t.pc != "stopped":
                for label, ch in self.trainer(st, who, t):
                    yield f"{who.upper()}: {label}", ch
        yield from self.bystander(st)
        yield from self.world(st)

    def world(self, st):
        for h, host in enumerate(st.hosts):
            put = lambda new: (*st.hosts[:h], new, *st.hosts[h + 1 :])  # noqa: B023, E731
            if host.state == UP:
                more = {"faults": st.faults + 1, "host_faults": st.host_faults + 1}
                if st.losses:
                    yield f"host {h} is lost", st._replace(hosts=put(Host(DOWN, E, E)), losses=st.losses - 1, **more)
                if st.offs:
                    yield (
                        f"host {h} goes away",
                        st._replace(hosts=put(host._replace(state=OFF)), offs=st.offs - 1, **more),
                    )
                for n, s, good in host.pieces:
                    if n.run:
                        continue
                    what = f"{name(n)} piece {s} on host {h}"
                    less = host.pieces - {(n, s, good)}
                    if st.evicts:
                        yield (
                            f"evicts {what}",
                            st._replace(
                                hosts=put(host._replace(pieces=less)),
                                evicts=st.evicts - 1,
                                faults=st.faults + 1,
                                hit=st.hit | {n},
                            ),
                        )
                    if st.flips and good:
                        yield (
                            f"flips a bit of {what}",
                            st._replace(
                                hosts=put(host._replace(pieces=less | {(n, s, False)})),
                                flips=st.flips - 1,
                                faults=st.faults + 1,
                                hit=st.hit | {n},
                            ),
                        )
            elif host.state == OFF:
                yield f"host {h} comes back", st._replace(hosts=put(host._replace(state=UP)))

    def bystander(self, st):
        pc, epoch = st.tool
        if pc == "ask":
            yield "forget: claims", st._replace(claims=st.claims + 1, tool=("publish", st.claims + 1))
        elif pc == "publish":
            top = max(
                st.top, self.forget_list(st, epoch), key=lambda x: x[0]
            )  # takes all near saves, as the documentation says
            void = {"acked": st.acked_d, "last": ()} if top[0] == epoch else {}
            yield "forget: publishes", st._replace(top=top, tool=("revise", epoch), **void)
        elif pc == "mend":  # a tool that takes over, trains nothing and cannot see the near dirs
            yield "tool: claims", st._replace(claims=st.claims + 1, tool=("mending", st.claims + 1))
        elif pc == "mending":
            near = st.top[2:] if self.r.tools_pass_near_on else (E, epoch)
            top = (epoch, frozenset(c.sid for c in self.counting(st.top, st.cks)), *near)
            yield "tool: publishes", st._replace(top=max(st.top, top, key=lambda x: x[0]), tool=("done", epoch))
        elif pc == "revise":
            if st.claims != epoch:
                yield "forget: overtaken", st._replace(tool=("done", epoch))
            else:
                yield (
                    "forget: is done",
                    st._replace(cks=self.revised(st, epoch), tool=("done", epoch), gone=True, ended=st.ended + 1),
                )

    def run(self):
        try:
            self.check(self.start)
        except Lost as lost:
            raise Lost(f"...: {lost}", 0) from None
        came, todo = {self.start: None}, [self.start]
        for st in todo:
            gen = self.all_steps(st)
            while True:
                try:
                    label, after = next(gen)
                except StopIteration:
                    break
                except Lost as lost:
                    raise Lost(" | ".join([*trace(came, st), "...: " + str(lost)]), len(came)) from None
                if after in came:
                    continue
                came[after] = (st, label)
                try:
                    self.check(after)
                except Lost as lost:
                    raise Lost(" | ".join([*trace(came, after), str(lost)]), len(came)) from None
                todo.append(after)
            if len(came) > self.limit:
                return len(came), "LIMIT"
        return len(came), "complete"

    def all_steps(self, st):
        for who in "ab":
            t = getattr(st, who)
            if t.pc == "forget":  # A, between its new claim and its list
                go = lambda st2, **kw: st2._replace(**{who: t._replace(**kw)})  # noqa: B023, E731
                if st.claims != t.epoch:
                    yield f"{who.upper()}: fenced", go(st, pc="stopped")
                else:
                    for label, ch in self.forgets(st, who, t, go):
                        yield f"{who.upper()}: {label}", ch
        yield from self.steps(st)


def trace(came, st):
    out = []
    while came[st] is not None:
        st, label = came[st]
        out.append(label)
    return out[::-1]


WORLDS = {
    "1 zombie and successor, 2 hosts": {"a": (2, 1), "b": (1, 1), "overlap": False},
    "2 a host is lost, or away and back": {"a": (2, 1), "b": (1, 0), "losses": 1, "offs": 1, "overlap": False},
    "3 three hosts, piece by piece": {"hosts": 3, "a": (2, 0), "b": (1, 0), "losses": 1, "offs": 0},
    "4 one trainer, saves that overlap": {"a": (3, 2), "b": (0, 0), "losses": 1},
    "5 two faults in the pieces": {"a": (3, 0), "b": (0, 0), "evicts": 1, "flips": 2, "wire": 1},
    "6 flips while B restores": {"a": (1, 1), "b": (1, 0), "flips": 1, "evicts": 1, "overlap": False},
    "7 goes back to its base": {"a": (3, 1), "b": (1, 0), "backs": 1, "overlap": False},
    "8 forget, from outside": {"a": (2, 1), "b": (1, 0), "tool": "ask", "x": True, "overlap": False},
    "9 forget, by the run": {"a": (2, 1), "b": (1, 0), "forgets": 1, "x": True, "offs": 1, "overlap": False},
    "10 the base gets a form": {"a": (2, 1), "b": (1, 0), "adopts": 1, "losses": 1, "overlap": False},
    "11 a copy of the run on the same hosts": {"a": (1, 1), "b": (1, 0), "other_run": True},
    "14 a tool takes over": {"a": (2, 1), "b": (1, 0), "tool": "mend", "losses": 1, "overlap": False},
    "13 zombie and successor, overlapping": {"a": (1, 1), "b": (1, 1)},
    "15 the store is away for a while": {"a": (3, 1), "b": (1, 1), "aways": 2, "overlap": False},
    "16 the same, and a host is lost": {"a": (2, 0), "b": (1, 0), "aways": 1, "losses": 1, "offs": 1},
    "12 a copy is spoiled on the wire": {"a": (2, 0), "b": (1, 0), "wire": 1, "losses": 1},
}
