"""Names from other libraries or earlier versions of recckpt -> what to write instead."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from opcode import opmap
from typing import Any, ParamSpec, TypeVar

from recckpt.text.words import nearest

_P = ParamSpec("_P")
_R = TypeVar("_R")

_KEEP = "write max_keep=3, or a policy of recckpt.policies such as Newest(2) | EveryNth(1000) | Best(3, 'auc')"
_WHEN = "write save_interval=1000, or a policy of recckpt.policies such as EveryEpochs(1) | EverySeconds(600)"
_ALL = "omit it: all that was attached, or registered by register_for_checkpointing(name, obj), is saved and restored"
_READERS = "CheckpointReader and follow read rows, load_into and Standby fill a model (docs/read.md)"
_BEST = "recckpt.find_checkpoint(output_dir, 'best', 'auc') has step, path and state; max_keep=Best(1, 'auc') keeps it"
_NEWEST = "latest_step(), or recckpt.find_checkpoint(output_dir, 'latest'), which has step, path and state"
_STATE = "save(state={...}) writes it, recckpt.find_checkpoint(output_dir, step).state reads it"
_NORM = "recckpt.sparse.clip_grad_norm_ limits gradients, torch.nn.functional.normalize(rows, dim=-1) rows"
_SCRIPT = "a script does that, by recckpt.CheckpointManager; the commands `recckpt show` and `recckpt export` read"
_OF_TRANSFERS = ("max_uploads", "min_free_bytes", "pre_download", "timeout_sec", "visible_sec", "work_dir")
_OF_RECIS = ("filter_out_sparse_param", "is_hashtable", "split_sparse_dense_state_dict")
_IN_SHELL = {  # command or option -> what to write
    **dict.fromkeys(("load", "load_checkpoint", "restore", "resume", "save"), _SCRIPT),
    **dict.fromkeys(("checkpoints", "latest", "list", "list_checkpoints"), "write `recckpt ls RUN`"),
}
_IN_PYTHON = {  # argument, attribute or name -> what to write
    # ModelCheckpoint, orbax and Hugging Face
    **dict.fromkeys(("best_fn", "best_mode", "monitor", "preservation_policy", "save_top_k", "should_keep_fn"), _KEEP),
    **dict.fromkeys(("keep_period", "keep_time_interval", "max_to_keep", "save_total_limit"), _KEEP),
    **dict.fromkeys(("every_n_train_steps", "save_decision_policy", "save_interval_steps", "save_steps"), _WHEN),
    **dict.fromkeys(("every_n_epochs", "save_on_train_epoch_end", "should_save_fn", "train_time_interval"), _WHEN),
    **dict.fromkeys(("args", "handler_registry", "item_handlers", "item_names", "items"), _ALL),
    **dict.fromkeys(("best_k_models", "best_model_path", "best_model_score", "best_step"), _BEST),
    **dict.fromkeys(("last_checkpoint", "last_model_path", "latest", "latest_checkpoint"), _NEWEST),
    **dict.fromkeys(("custom_metadata", "item_metadata", "metadata", "metrics"), _STATE),
    **dict.fromkeys(("checkpoint_dir", "directory", "dirpath"), "write output_dir=...; saver.output_dir has it"),
    **dict.fromkeys(("max_keep", "model", "output_dir"), "it belongs to the saver: Saver(max_keep=3), saver.max_keep"),
    **dict.fromkeys(("filename", "step_name_format"), "write step_prefix='model' for model_300"),
    **{name: f"write transfers=Transfers({name}=...) of recckpt.policies" for name in _OF_TRANSFERS},
    **{name: f"write recckpt.inspect.{name}" for name in ("connect", "history", "is_checkpoint", "scan")},
    **{name: f"write recckpt.rewrite.{name}" for name in ("compact", "forget", "mirror")},
    **{name: f"write recckpt.recis.{name}" for name in _OF_RECIS},
    **dict.fromkeys(("manager", "saver"), "pass each option separately, such as max_keep=3"),
    **dict.fromkeys(("async_options", "enable_async_checkpointing"), "write async_save=True, the default of attach"),
    **dict.fromkeys(("load", "load_checkpoint"), "write restore(), or saver.load(path) for a checkpoint elsewhere"),
    "backpressure": "write async_save='latest', or 'skip', or 'wait'",
    "check_for_errors": "write wait_until_finished(), which raises the error of the save",
    "checkpoints": "write recckpt.list_checkpoints(output_dir)",
    "dataset": "for training data write loader=..., for rows of a table recckpt.inspect.dataset(path, table)",
    "event_time": "write manager.event_time = ...",
    "force": "omit it: save() saves whatever should_save() says",
    "grace_sec": "write save_on_signal=OnSignal(('SIGTERM',), grace_sec=240) of recckpt.policies",
    "is_saving_in_progress": "write saver.is_saving",
    "mode": "for checkpoints write Best(3, 'auc', mode='max'), for rows table.bag(ids, mode='mean')",
    "near_interval": "write near=Near(path, interval=20)",
    "options": "pass each option separately, such as max_keep=3",
    "progress": "TQDM_DISABLE=1 in the environment shows no bars",
    "raise_after": "write on_save_error=Tolerate(raise_after=10) of recckpt.policies",
    "reload_interval": "write load_model_bank(bank, reload_interval=1000)",
    "save_last": "omit it: the newest checkpoint is always kept",
    "save_slots": "write choose=Choose(slots=['*@count']) of recckpt.policies",
    "save_weights_only": "write choose=Choose(slots=[]) of recckpt.policies",
    "save_where": "write choose=Choose(where={'item': {'count': {'min': 2}}}) of recckpt.policies",
    "sparse_optim": "write optimizers=[...], with all optimizers",
    "step": "omit it: step() counts automatically; save(300) and restore(300) accept a step",
    "store": "write choose=Choose(store={'*@*exp_avg*': 'bfloat16'}) of recckpt.policies",
    "strict": "write load_conf={'strict': False}",
    "verbose": "write logging.basicConfig(level=logging.INFO): a line for each save",
    # nn.Embedding and nn.EmbeddingBag
    **dict.fromkeys(("max_norm", "norm_type"), _NORM),
    "_weight": "write HashTable.from_embedding(module, name=...)",
    "embedding_dim": "it is the first argument of a table; table.embedding_shape[-1] has it",
    "include_last_offset": "write table.bag(ids, offsets, include_last_offset=True)",
    "num_embeddings": "omit it: a table grows; len(table) is its number of rows",
    "padding_idx": "write padding_id, which may be any int64",
    "reset_parameters": "write table.clear(): ids get new rows when training meets them again",
    "scale_grad_by_freq": "omit it: gradients of an id that occurs several times add up",
    "sparse": "omit it: gradients have only a batch's rows, for recckpt.sparse.SparseAdam([table]) or another",
    "weight": "table.lookup(ids)[0] reads rows, table.insert(ids, rows) sets them, table.embeddings() has all",
}
_GONE = {  # names of earlier versions, in the shell and in Python
    **dict.fromkeys(("ReadOnlyManager", "read_only"), _READERS),
    "first": "to find the first checkpoint with a NaN, copy the loop over list_checkpoints and CheckpointReader from "
    "docs/does-not-resume.md#the-loss-is-nan",
    **dict.fromkeys(
        ("LibraryExport", "LibraryTable"),
        "a hash table of your own is a recckpt.types.SavableTable in the state dict, saved whole at each save",
    ),
    **dict.fromkeys(
        ("max_upload_rate", "--max-upload-rate"),
        "bytes a second are shaped by the store or the host's network; Transfers(max_uploads=4) limits files at once",
    ),
    "csv": "convert CSV by way of Parquet, with polars: pl.read_csv(...).write_parquet(...) before an import, "
    "pl.read_parquet(...).write_csv(...) after an export; docs/convert.md has both lines",
    "AveragedModel": "average the rows by recckpt.averages.RowAverage(model, decay), and the layers by "
    "AveragedModel(torch.nn.ParameterList(model.parameters()))",
    "RowAverage": "write recckpt.averages.RowAverage",
    "salvage": "`recckpt export CKPT TARGET --to parquet --skip-damaged` writes the undamaged rows",
}


def write_instead(word: str, *, in_shell: bool = False) -> str:
    """Return the end of a message for an unknown word that has a known replacement; "" for other words."""
    instead = {**(_IN_SHELL if in_shell else _IN_PYTHON), **_GONE}.get(word)
    return f": {instead}" if instead else ""


def unknown_name(module: str, name: str) -> Exception:
    """Return the error for a name that a module lacks; called by the module's ``__getattr__``.

    ``from module import name`` drops the text of an AttributeError, but shows the text of an ImportError; ``hasattr``
    and similar calls need an AttributeError.
    """
    instead, caller = write_instead(name), sys._getframe(2)
    if instead and caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name {name!r} from {module!r}{instead}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}{instead}")


def unknown_attribute(obj: object, name: str) -> AttributeError:
    text = f"{type(obj).__name__!r} object has no attribute {name!r}{write_instead(name)}"
    return AttributeError(text, name=name, obj=obj)


def answers_by(example: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that adds advice to the error for wrong arguments.

    ``example`` is a correct call; for a class with subclasses, only its arguments, in parentheses.
    """

    def decorated(call: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(call)
        def answering(*args: _P.args, **options: _P.kwargs) -> _R:
            try:
                return call(*args, **options)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # the error came from inside the call
                name = call.__qualname__
                if name.endswith(".__init__"):
                    name = type(args[0]).__name__
                would_do = f"{name}{example}" if example.startswith("(") else example
                raise TypeError(f"{_misfit(error, call, name, options)}; a call that works is {would_do}") from None

        return answering

    return decorated


def _misfit(error: TypeError, call: Callable[..., object], name: str, options: Mapping[str, Any]) -> str:
    known = inspect.signature(call).parameters
    problem = str(error).partition(". Did you mean")[0]  # Python's own suggestion, from 3.13 on
    problem = problem.replace(call.__qualname__, name.rpartition(".")[2])
    unknown = [word for word in options if word not in known]
    guess = ""
    if unknown and "unexpected" in problem and not write_instead(unknown[0]):  # Python's message names it already
        guess = nearest(unknown.pop(0), known)
    words: dict[str, list[str]] = {}  # what to write -> the wrong words
    for word in unknown:
        words.setdefault(write_instead(word) or nearest(word, known) or ": there is no such argument", []).append(
            repr(word)
        )
    return "; ".join([f"{problem}{guess}", *(f"{', '.join(names)}{instead}" for instead, names in words.items())])
