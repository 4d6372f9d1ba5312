"""A bug to plant: it changes the source of one function of recckpt, so a harness that misses it proves nothing."""

import __future__

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Plant:
    """A bug.

    Attributes:
        where: the function that has it, as ``module:qualified.name``.
        old: a text that is in its source once.
        new: what the bug has in its place.
    """

    where: str
    old: str
    new: str

    @property
    def function(self):
        module, _, path = self.where.partition(":")
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return getattr(found, "fget", found)  # of a property

    @property
    def code(self):
        """The code of the function with the bug."""
        function = self.function
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, (
            f"{self.where} has not this once, so the bug has to be planted anew: {self.old}"
        )
        names = dict(vars(sys.modules[function.__module__]))
        changed = source.replace(self.old, self.new)
        flags = __future__.annotations.compiler_flag
        exec(compile(changed, f"<planted in {self.where}>", "exec", flags, dont_inherit=True), names)
        made = names[function.__name__]
        return getattr(made, "fget", made).__code__
