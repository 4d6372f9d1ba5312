"""The optimizers of FBGEMM's fused kernels: which slots their states are, and what is proven of the rows they change.

Proven is that a step changes no rows but those that were looked up: bit for bit, on the CPU, over random models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recckpt.errors import LiveTableError

_ADAGRAD, _ROWWISE_ADAGRAD = "exact_adagrad", "exact_row_wise_adagrad"
_PROVEN = frozenset({"exact_sgd", _ADAGRAD, _ROWWISE_ADAGRAD})
_SLOTS: Mapping[str, Sequence[str]] = {  # in the order in which the kernel gives its states
    "exact_sgd": (),
    _ADAGRAD: ("sparse_adagrad_sum",),
    _ROWWISE_ADAGRAD: ("sparse_rowwise_adagrad_sum",),
    "ema_in_place_row_wise_adagrad": ("sparse_rowwise_adagrad_sum",),
    "adam": ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"),
    "partial_row_wise_adam": ("sparse_partial_rowwise_adam_exp_avg", "sparse_partial_rowwise_adam_exp_avg_sq"),
    "lamb": ("sparse_lamb_exp_avg", "sparse_lamb_exp_avg_sq"),
    "partial_row_wise_lamb": ("sparse_partial_rowwise_lamb_exp_avg", "sparse_partial_rowwise_lamb_exp_avg_sq"),
    "lars_sgd": ("sparse_lars_sgd_momentum",),
}
_PREV_ITER, _ROW_COUNTER = "sparse_fbgemm_prev_iter", "sparse_fbgemm_row_counter"
_SETTINGS = ("eps", "weight_decay")  # beside the learning rate; betas of those that have moments
_WITH_BETAS = ("adam", "lamb")


def slots_of(kernel: Any) -> Sequence[str]:
    """Return the slots of a kernel, in the order of its ``split_optimizer_states()``.

    Raises:
        LiveTableError: its states cannot be saved by rows.
    """
    kind = _kind(kernel)
    if kind not in _SLOTS:
        raise LiveTableError(
            f"its optimizer is {kind!r}, whose states recckpt does not know: train it by one of {', '.join(_SLOTS)}"
        )
    slots = list(_SLOTS[kind])
    has_counter = kernel._used_rowwise_adagrad_with_counter
    if has_counter or _has_global_decay(kernel):
        slots.append(_PREV_ITER)
    if has_counter or (kind == "adam" and kernel.use_rowwise_bias_correction):
        slots.append(_ROW_COUNTER)
    return slots


def reason_of(kernel: Any) -> str | None:
    """Return why rows may change that were not looked up; None where it is proven that none do."""
    kind = _kind(kernel)
    if _has_global_decay(kernel):
        return f"{kind} with global weight decay is not proven to change no rows but those looked up"
    return None if kind in _PROVEN else f"{kind} is not proven to change no rows but those looked up"


def settings_of(kernel: Any) -> dict[str, Any]:
    """Return the settings of the optimizer of a kernel as they stand in a parameter group."""
    arguments = kernel.optimizer_args
    settings: dict[str, Any] = {"lr": float(kernel.get_learning_rate())}
    if any(part in _kind(kernel) for part in _WITH_BETAS):
        settings["betas"] = (float(arguments.beta1), float(arguments.beta2))
    names = [name for name in _SETTINGS if name != "eps" or "sgd" not in _kind(kernel)]
    return settings | {name: float(getattr(arguments, name)) for name in names}


def _kind(kernel: Any) -> str:
    return str(kernel.optimizer.value)


def _has_global_decay(kernel: Any) -> bool:
    return bool(kernel._used_rowwise_adagrad_with_global_weight_decay)
