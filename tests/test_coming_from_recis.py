"""The chapter for users of RecIS names nothing that is not there."""

import inspect
import re

import pytest
from support.paths import ROOT

import recckpt
from recckpt import CheckpointManager, Saver, sparse
from recckpt.convert.recis_optimizers import SLOT_THERE
from recckpt.policies import when

PAGE = (ROOT / "docs/coming-from.md").read_text().partition("\n## RecIS, option by option\n")[2]


def test_what_it_names_on_the_right_is_there():
    right = "\n".join(line.rpartition(" | ")[2] for line in PAGE.splitlines() if line.startswith("| `"))
    for name in re.findall(r"`(Sparse\w+|HashTable|ShardedHashTable|EmbeddingCollection|hash_ids|Constant)[`(]", right):
        assert hasattr(sparse, name)
    for name in re.findall(r"manager\.(\w+)\(", right):
        assert hasattr(CheckpointManager, name)
    for name in re.findall(r"saver\.(\w+)\(", right):
        assert hasattr(Saver, name)
    for name in re.findall(r"table\.(\w+)[(\[`]", right):
        assert hasattr(sparse.HashTable, name)
    for name in re.findall(r"recckpt\.(\w+)`", right):
        assert hasattr(recckpt, name)


def test_the_slots_and_defaults_are_those_it_says():
    slots = {
        name
        for rule in vars(sparse).get("__all__", ())
        if rule.startswith("Sparse")
        for name in getattr(sparse, rule).slot_names
    }
    for name in re.findall(r"`(sparse_\w+)`", PAGE):
        assert name in slots | {"sparse_optim", *SLOT_THERE.values()}
    assert inspect.signature(sparse.SparseAdagrad).parameters["lr"].default == 1e-2
    row_wise = inspect.signature(sparse.SparseRowWiseAdagrad).parameters
    assert (row_wise["lr"].default, row_wise["eps"].default) == (1e-2, 1e-8)
    for rule in (sparse.SparseAdagrad, sparse.SparseRowWiseAdagrad):
        assert {"weight_decay", "lr_decay", "maximize"} <= inspect.signature(rule).parameters.keys()


# of SaverOptions, TrainingArguments, a save and Exporter in RecIS 1.2
OPTIONS = [
    *("model", "sparse_optim", "output_dir", "model_bank", "max_keep", "concurrency", "params_not_save"),
    *("save_filter_fn", "max_to_keep", "save_concurrency_per_rank", "save_steps", "save_every_n_windows"),
    *("save_every_n_epochs", "save_end", "load_update_steps", "load_update_windows", "load_update_epochs"),
    *("saver_option", "ckpt_save_arg", "ckpt_load_arg", "gradient_accumulation_steps", "train_epoch"),
    *("window_iter", "train_steps", "mixed_precision", "prefetch", "ckpt_dir", "export_dir"),
    *("filter_sparse_opt", "sparse_model_name", "dense_model_name", "dataset", "dense_optimizer"),
    *("export_folder_name", "export_model_name", "export_outputs", "fg", "fg_conf_or_path", "mc_conf_or_path"),
    *("label_key", "label_value"),
    # newer than 1.2
    *("sync_func", "direct_path", "read_tensor", "add_params", "register_combiner", "grad_reduce_by", "source_group"),
    *("group_sum", "SparseAdagradSum", "SparseRowWiseAdagradSum", "get_step_update_info", "super_param_state_dict"),
    *("slot_by_name", "requires_optimizer_state"),
]


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_of_recis_is_on_the_left(option):
    left = "\n".join(line.rpartition(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `"))
    left += "\n".join(line for line in PAGE.splitlines() if line.startswith("| labels"))
    assert re.search(rf"\b{option}\b", left)


def test_the_policies_and_arguments_that_it_names_are_there():
    for name in set(re.findall(r"\b(Every[A-Z]\w+)\(", PAGE)):
        assert hasattr(when, name)
    saver, manager = (inspect.signature(made).parameters for made in (Saver, CheckpointManager))
    assert {"choose", "max_keep", "concurrency"} <= saver.keys()
    assert "save_interval" in manager
    assert "reload_interval" in inspect.signature(CheckpointManager.load_model_bank).parameters
    assert [saver[name].default for name in ("output_dir", "max_keep", "concurrency")] == ["./", 1, 4]
    assert manager["save_interval"].default is inspect.Parameter.empty
    for name in set(re.findall(r"`manager\.(\w+)`", PAGE)):
        assert hasattr(CheckpointManager, name)
