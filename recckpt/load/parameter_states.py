"""Where the state of dense optimizers comes from: it follows the parameters, as slots follow ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recckpt.load.matching import Match, Planned
from recckpt.load.selection import Name


def follow(name: Name, planned: Mapping[Name, Planned], matches: Sequence[Match]) -> Planned:
    """Plan the state of one parameter: from where the parameter comes, under the name it has there.

    Args:
        name: ``parameter@optimizer``.
        planned: where everything else comes from.
        matches: the offers beside the names of the model.
    """
    parameter = planned.get(Name("dense", name.parameter))
    if parameter is None:
        return _of_no_tensor(name, matches)
    if parameter.offer is None:
        return Planned(name, reason="its parameter is not loaded")
    match = matches[parameter.offer]
    if name not in match.there:
        return Planned(name, reason="nothing asks for it")
    if parameter.conversion.rpartition(", ")[2].startswith("resize"):
        return Planned(name, reason="its parameter is resized")
    return _taken(name, parameter.offer, match)


def _of_no_tensor(name: Name, matches: Sequence[Match]) -> Planned:
    """A parameter that is not in the model's state dict, as that of a loss, is at home in the own run only."""
    for number, match in enumerate(matches):
        if match.offer.entry.is_own and name in match.there:
            return _taken(name, number, match)
    return Planned(name, reason="its parameter is not in the model")


def _taken(name: Name, number: int, match: Match) -> Planned:
    source = match.there[name]
    if source in match.offer.inventory:
        return Planned(name, number, source.text, match.offer.inventory[source])
    optimizer = source.text.rpartition("@")[2]
    if Name("dense_opt", optimizer) in match.offer.inventory:
        what = f"{optimizer!r} there does not train {source.parameter!r}"
    elif Name("extra", optimizer) in match.offer.inventory:
        what = f"{optimizer!r} there has no names of parameters"
    else:
        what = f"{match.offer.label} has no {optimizer!r}"
    return Planned(name, reason=what)
