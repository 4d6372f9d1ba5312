"""The page adapts a hash table of another library: here a stand-in, with the methods that the page calls."""

from support.fake_libraries import FakeDynamicemb

theirs = FakeDynamicemb("item", dim=2)
theirs.train([7, -3, 1 << 40])
