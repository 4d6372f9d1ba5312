"""What a manifest says of the optimizers of a run: their classes, and what they trained that is not saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from recckpt.format.json_fields import Fields

Lineage = tuple[str, ...]  # the name of a class, and of those that it inherits from


@dataclass(frozen=True)
class Unsaved:
    """What trained the model, or should have, and left no state in the checkpoint."""

    optimizers: tuple[str, ...] = ()  # classes of optimizers that stepped dense parameters
    tables: tuple[str, ...] = ()  # tables that a sparse optimizer trains
    gradients: tuple[str, ...] = ()  # tables with gradients that no optimizer takes

    @property
    def descriptions(self) -> list[str]:
        """A line for each thing that the checkpoint lacks."""
        tables, gradients = (", ".join(map(repr, names)) for names in (self.tables, self.gradients))
        gaps = {
            f"the state of {', '.join(self.optimizers)}, which trained dense parameters": self.optimizers,
            f"the steps and hyper-parameters of the optimizer that trained {tables}": self.tables,
            f"what gradients should have changed in {gradients}: no optimizer took them": self.gradients,
        }
        return [text for text, names in gaps.items() if names]


@dataclass(frozen=True)
class Training:
    """The optimizers of a run."""

    optimizers: Mapping[str, Lineage] = field(default_factory=dict)  # registered name -> class
    unsaved: Unsaved = field(default_factory=Unsaved)


def training_json(training: Training) -> dict[str, Any]:
    """Return the field of a manifest, none where there is nothing to say."""
    unsaved = {key: list(names) for key, names in asdict(training.unsaved).items() if names}
    classes = {name: list(lineage) for name, lineage in training.optimizers.items()}
    values = {key: value for key, value in (("optimizers", classes), ("unsaved", unsaved)) if value}
    return {"training": values} if values else {}


def parse_training(fields: Fields) -> Training:
    """Return what :func:`training_json` wrote in a manifest."""
    if not fields.has("training"):
        return Training()
    values = fields.mapping("training")
    classes, unsaved = (values.named_texts(key) if values.has(key) else {} for key in ("optimizers", "unsaved"))
    known = {key: unsaved.get(key, ()) for key in asdict(Unsaved())}
    return Training({name: lineage for name, lineage in classes.items() if lineage}, Unsaved(**known))


def misfit(saved: Lineage, live: Lineage) -> str:
    """Say by whom a state was saved that an optimizer does not take; "" where one class inherits from the other."""
    is_akin = not saved or not live or saved[0] in live or live[0] in saved
    return "" if is_akin else f"{saved[0]}, this one is {live[0]}"
