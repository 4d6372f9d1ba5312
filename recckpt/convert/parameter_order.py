"""The names of the parameters of an optimizer that a file knows by number alone."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from recckpt.convert.source import SourceTensor

NAMES = "param_names"  # torch's own word, where an optimizer was made with named parameters
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of batch normalization, which are not trained
_PREFIXES, _ANCHOR, _WEIGHT = ("module.", "_orig_mod."), ".anchor", ".weight"


class ParameterOrder:
    """Finds the names of parameters: by the file, an optimizer that is given, a model, or the order of the tensors.

    Args:
        tensors: of the model, as the file has them.
        tables: those that become tables.
        model: whose parameters they are, or a model in which tables stand in their place; None where there is none.
    """

    def __init__(self, tensors: Mapping[str, SourceTensor], tables: Collection[str], model: Any) -> None:
        self.tensors, self.tables, self._model = tensors, tables, model

    def names(self, saved: Mapping[str, Any], optimizer: Any, *, n_saved: int) -> list[str]:
        """Return the names for the indices of a saved state, in their order.

        Args:
            saved: state dict of an optimizer of torch.
            optimizer: over the same parameters, live; None where there is none.
            n_saved: how many parameters all optimizers of the file have.

        Raises:
            ValueError: they are not known; says why.
        """
        n = n_parameters(saved)
        listed = [name for group in saved["param_groups"] for name in group.get(NAMES, ())]
        if optimizer is not None:
            return _checked(self._of(optimizer), n, "the optimizer that is given has")
        if len(listed) == n:
            return [self._in_file(name) for name in listed]
        orders = {tuple(order) for order in self._orders(n_saved) if len(order) == n}
        fitting = [order for order in orders if self._fits(saved, order)]
        if len(fitting) == 1:
            return list(fitting[0])
        where = "the model" if self._model is not None else "the file"
        why = f"its {n} parameters are in no order of those of {where}" if not fitting else "its order is not known"
        remedy = "optimizers=" if self._model is not None else "model="
        raise ValueError(f"{why}: give import_checkpoint {remedy} to name them")

    @property
    def is_of_tensors(self) -> bool:
        """Whether there is nothing but the order of the tensors to go by."""
        return self._model is None

    def _of(self, optimizer: Any) -> list[str]:
        known = {id(parameter): name for name, parameter in self._named()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        tables = [getattr(parameter, "table", None) for parameter in parameters]
        if any(table is None and id(one) not in known for table, one in zip(tables, parameters, strict=True)):
            raise ValueError("the optimizer that is given has parameters that are not those of the model")
        pairs = zip(parameters, tables, strict=True)
        return [self._in_file(known[id(one)] if table is None else table.name) for one, table in pairs]

    def _named(self) -> Iterator[tuple[str, Any]]:
        if self._model is not None:
            yield from self._model.named_parameters()

    def _orders(self, n_saved: int) -> Iterator[list[str]]:
        """Yield the orders in which an optimizer may have been given the parameters.

        Some of them only, those of tables or all others, are the parameters of one where others have the rest.
        """
        if self._model is None:
            whole = [name for name in self._first_of_tied() if name.rpartition(".")[2] not in _BUFFERS]
            trained = whole
        else:
            whole = [self._in_file(name) for name, _ in self._named()]
            trained = [self._in_file(name) for name, parameter in self._named() if parameter.requires_grad]
        for order in (whole, trained):
            yield order
            if len(order) == n_saved:
                yield [name for name in order if name not in self.tables]
                yield [name for name in order if name in self.tables]

    def _first_of_tied(self) -> Iterable[str]:
        first: dict[Hashable, str] = {}
        for name, tensor in self.tensors.items():
            first.setdefault(tensor.same, name)
        return first.values()

    def _fits(self, saved: Mapping[str, Any], names: Sequence[str]) -> bool:
        """Say whether the states are of the shapes of these parameters."""
        return all(
            tuple(value.shape) in ((), self.tensors[name].shape)
            for name, values in by_name(saved, names).items()
            for value in values.values()
            if hasattr(value, "shape")
        )

    def _in_file(self, name: str) -> str:
        """Return what the file calls a parameter of the model, a table, or the parameter that stands for its rows."""
        plain = name.removesuffix(_ANCHOR)
        names = [name, f"{name}{_WEIGHT}", plain, f"{plain}{_WEIGHT}"]
        names += [prefix + each for each in names for prefix in _PREFIXES]
        names += [_without(each, _PREFIXES) for each in names]
        found = next((each for each in names if each in self.tensors), None)
        if found is None:
            raise ValueError(f"found no tensor {name!r}, expected each parameter in the file")
        return found


def n_parameters(saved: Mapping[str, Any]) -> int:
    """Return how many parameters an optimizer has."""
    return sum(len(group["params"]) for group in saved["param_groups"])


def by_name(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the state of each parameter, whose names are in the order of the indices."""
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    return {name: saved["state"].get(index, {}) for index, name in zip(indices, names, strict=True)}


def _checked(names: list[str], n: int, what: str) -> list[str]:
    if len(names) != n:
        raise ValueError(f"{what} {len(names)} parameters, the file {n}")
    return names


def _without(name: str, prefixes: Iterable[str]) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name
