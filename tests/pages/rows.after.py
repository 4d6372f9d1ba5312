"""The numbers in the comments and tables of the page are right."""

import re

from support.documents import PAGES

import recckpt

table, page = model.user, PAGES["rows.md"].read_text(encoding="utf-8")
assert (table.ids().tolist(), table.slots["count"].tolist()) == ([7], [2])
assert table.candidates.ids().tolist() == [8]
assert table.now == (1, 1_700_000_000)
for given in re.findall(r"^\| `((?:MinCount|Probability)\(.*?\))` \|", page, re.MULTILINE):
    assert HashTable(2, name="t", admit=eval(given)).admit is not None
sizes = re.findall(r"^\| (?:up to )?([\d,]+) \| ([\d.]+) \| ([\d.]+) (MiB|GiB) \| (\d+) \|", page, re.MULTILINE)
assert len(sizes) == 4
for capacity, error, size, unit, each in sizes:
    bloom = Bloom(int(capacity.replace(",", "")), float(error))
    assert round(bloom.nbytes / 2 ** (20 if unit == "MiB" else 30), 1) == float(size)
    assert round(bloom.nbytes / bloom.capacity) == int(each)

ids = scorer["table"].ids()
assert not torch.equal(rows_averaged.tables["item"].lookup(ids)[0], scorer["table"].embeddings())
found = recckpt.CheckpointReader("runs/averaged").lookup("item.average", ids.numpy()).values
assert torch.equal(torch.from_numpy(found), rows_averaged.tables["item"].lookup(ids)[0])

shown = recckpt.CheckpointReader("runs/averages")
assert torch.equal(torch.from_numpy(shown.lookup("item", ids.numpy()).values), torch.from_numpy(found))
assert torch.equal(torch.from_numpy(shown.read_tensor("top.weight")), [*averaged.module][1])
assert not torch.equal([*averaged.module][1], scorer["top"].weight)

assert not rows.requires_grad
assert rows[1].tolist() == [0] * 16
assert item.requires_grad
assert 1_000_000 in item.ids().tolist()
