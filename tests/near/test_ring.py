"""Who copies whose files: each rank has as many copies as there can be, on other hosts, and the work is shared."""

from collections import Counter

from hypothesis import strategies as st
from support.drawn import drawn

from recckpt.near.ring import copies_of, receivers, writers

HOSTS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=24)


def test_the_host_that_follows_has_the_copy_and_its_ranks_share_the_work():
    hosts = ["b", "b", "a", "a", "c"]
    assert receivers(hosts, 1) == [(4,), (4,), (0,), (1,), (2,)]
    assert copies_of(hosts, 1) == {"a": ("b",), "b": ("c",), "c": ("a",)}
    assert receivers(hosts, 2) == [(4, 2), (4, 3), (0, 4), (1, 4), (2, 0)]
    assert receivers(hosts, 0) == [()] * 5
    assert writers(hosts, 1) == [{0, 1, 2, 3}, {0, 1, 2, 3}, {2, 3, 4}, {2, 3, 4}, {4, 0, 1}]
    assert writers(hosts, 0) == [{0, 1}, {0, 1}, {2, 3}, {2, 3}, {4}]
    assert copies_of(hosts, 0) == copies_of(["a", "a"], 1) == {}
    assert receivers(["a", "a"], 1) == [(), ()]


@drawn(HOSTS, st.integers(0, 7), few=50, many=5000)
def test_each_rank_is_copied_to_as_many_other_hosts_as_there_can_be(hosts, copies):
    expected = min(copies, len(set(hosts)) - 1)
    there_too = writers(hosts, copies)
    for rank, there in enumerate(receivers(hosts, copies)):
        assert {at for at, ranks in enumerate(there_too) if rank in ranks} >= {rank, *there}
        others = {hosts[receiver] for receiver in there}
        assert len(there) == len(others) == expected
        assert hosts[rank] not in others
        assert others == set(copies_of(hosts, copies).get(hosts[rank], ()))


@drawn(HOSTS, st.integers(0, 7), few=50, many=5000)
def test_no_host_copies_for_more_hosts_than_another_and_no_rank_more_than_its_share(hosts, copies):
    made = receivers(hosts, copies)
    n_hosts = Counter()  # whose files a host copies
    for host, sender in {(hosts[receiver], hosts[rank]) for rank, there in enumerate(made) for receiver in there}:
        assert host != sender
        n_hosts[host] += 1
    assert set(n_hosts.values()) <= {min(copies, len(set(hosts)) - 1)}
    sizes = Counter(hosts)
    of_pairs = Counter((hosts[rank], receiver) for rank, there in enumerate(made) for receiver in there)
    for (sender, receiver), n_ranks in of_pairs.items():
        assert n_ranks <= -(-sizes[sender] // sizes[hosts[receiver]])
