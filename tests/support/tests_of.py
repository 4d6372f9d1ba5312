"""Which test files try a source file; as a script: ``tests_of.py FILE`` prints them, for ``make test-of``.

The tests of recckpt/a/b.py are tests/a/test_b.py and those that TESTS lists for a/b.py, else those it lists for a/.
"""

import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Each of them enters the source file, and one of them for a folder: `make test-entered` looks whether that is so.
TESTS = {
    "__init__.py": "test_architecture.py",
    "__main__.py": "cli/test_app.py",
    "checkpoint/": "compaction/test_compact.py",
    "checkpointer/": "checkpointer/test_contract.py",
    "checkpointer/__init__.py": "checkpointer/test_documents.py",
    "checkpointer/worker.py": "checkpointer/test_async.py",
    "cli/absent.py": "cli/test_wrong_places.py cli/test_forget_command.py",
    "cli/behind.py": "cli/test_forget_command.py cli/test_near_command.py",
    "cli/commands.py": "cli/test_app.py cli/test_usage.py",
    "cli/compact.py": "cli/test_compact_command.py",
    "cli/consolidate.py": "cli/test_consolidate_command.py",
    "cli/convert_options.py": "cli/test_import.py cli/test_export.py",
    "cli/examples.py": "cli/test_app.py",
    "cli/forget.py": "cli/test_forget_command.py",
    "cli/import_source.py": "cli/test_import.py",
    "cli/look_options.py": "cli/test_usage.py cli/test_latest.py",
    "cli/keep_option.py": "cli/test_mirror_command.py",
    "cli/mirror.py": "cli/test_mirror_command.py",
    "cli/misspelt.py": "cli/test_usage.py",
    "cli/near.py": "cli/test_near_command.py",
    "cli/passed_by.py": "cli/test_latest.py",
    "cli/plan.py": "cli/test_plan_command.py",
    "cli/repair.py": "cli/test_repair_command.py",
    "cli/run_options.py": "cli/test_usage.py",
    "cli/result.py": "cli/test_app.py",
    "cli/salvage.py": "cli/test_salvage_command.py",
    "cli/verify.py": "cli/test_verify_command.py",
    "compaction/": "compaction/test_compact.py",
    "convert/": "convert/test_sources.py convert/test_targets.py convert/test_torch_formats.py convert/test_recis.py",
    "convert/sources/": "convert/test_sources.py convert/test_torch_formats.py convert/test_recis.py",
    "convert/dynamicemb_files.py": "convert/test_dynamicemb.py",
    "convert/named.py": "convert/test_torchrec.py convert/test_dynamicemb.py",
    "convert/parameter_order.py": "convert/test_torch_optimizers.py",
    "convert/sources/dynamicemb.py": "convert/test_dynamicemb.py",
    "convert/sources/torchrec.py": "convert/test_torchrec.py",
    "convert/targets/": "convert/test_targets.py convert/test_torch_formats.py convert/test_recis.py",
    "convert/targets/dynamicemb.py": "convert/test_dynamicemb.py",
    "convert/torchrec_ids.py": "convert/test_torchrec.py",
    "convert/torchrec_names.py": "convert/test_torchrec.py",
    "dense/file_check.py": "dense/test_saver.py",
    "dense/optimizer_class.py": "dense/test_keyed_optimizer.py",
    "dense/plain_values.py": "dense/test_registered.py",
    "dense/sharded.py": "dense/test_keyed_optimizer.py",
    "dense/torch_archive.py": "dense/test_saver.py",
    "forgetting/": "forgetting/test_forget.py",
    "forgetting/plan.py": "cli/test_forget_command.py",
    "format/dtypes.py": "dense/test_tensors.py",
    "format/forget_audit.py": "forgetting/test_forget_audit.py",
    "format/forget_request.py": "forgetting/test_forget.py",
    "format/near_names.py": "format/test_near_seal.py",
    "format/near_list.py": "near/test_near_saves.py",
    "format/moments.py": "inspect/report/test_health.py",
    "format/names.py": "load/test_plan.py",
    "format/tables.py": "format/test_manifest.py",
    "format/tensor_index.py": "dense/test_tensors.py",
    "format/training.py": "format/test_manifest.py",
    "inspect/absent.py": "forgetting/test_forget.py cli/test_wrong_places.py",
    "inspect/at_a_glance.py": "test_reprs.py inspect/test_pages_in_a_browser.py",
    "inspect/consolidate.py": "distributed/test_sharded_dense.py cli/test_consolidate_command.py",
    "inspect/diff/": "inspect/diff/test_diff.py",
    "inspect/diff/generators.py": "inspect/diff/test_diff.py",
    "inspect/fuller.py": "cli/test_salvage_command.py",
    "inspect/why_kept.py": "cli/test_ls.py",
    "inspect/ids_file.py": "cli/test_forget_command.py",
    "inspect/libraries.py": "inspect/report/test_report.py",
    "inspect/norms.py": "inspect/report/test_report.py inspect/over_time/test_history.py",
    "inspect/over_time/": "inspect/over_time/test_history.py inspect/over_time/test_first.py",
    "inspect/report/": "inspect/report/test_report.py inspect/report/test_health.py",
    "inspect/salvage_link.py": "inspect/test_salvage.py inspect/test_salvage_chains.py",
    "inspect/save_times.py": "inspect/report/test_report.py",
    "inspect/slabs.py": "inspect/diff/test_diff.py inspect/over_time/test_first.py",
    "inspect/verify_checkpoint.py": "inspect/test_verify.py",
    "inspect/watch/": "inspect/watch/test_watcher.py cli/test_watch.py",
    "inspect/whole_slot.py": "inspect/test_reader.py inspect/test_reader_of_chains.py",
    "integrations/run_options.py": "integrations/test_lightning.py integrations/test_transformers.py",
    "live/__init__.py": "live/test_tables.py",
    "live/torch_announcer.py": "live/test_torch_embedding.py",
    "live/absent.py": "integrations/test_live_torchrec.py",
    "live/dtensor_embedding.py": "live/test_dtensor.py",
    "live/column_rows.py": "live/test_column_exchange.py",
    "live/collision_map.py": "integrations/test_live_collisions.py",
    "live/torchrec_collision.py": "integrations/test_live_collisions.py",
    "live/keyed_types.py": "live/test_keyed_table.py",
    "live/keyed_store.py": "live/test_keyed_table.py",
    "live/keyed_target.py": "live/test_keyed_table.py",
    "live/library_rows.py": "live/test_library.py",
    "live/library_store.py": "live/test_library.py",
    "live/library_types.py": "live/test_library.py",
    "live/options.py": "live/test_adapters.py live/test_library.py",
    "live/shared_rows.py": "live/test_keyed_table.py",
    "sparse/table/device_prints.py": "sparse/table/test_fingerprints.py",
    "sparse/table/print_words.py": "sparse/table/test_fingerprints.py",
    "sparse/table/exported_marks.py": "live/test_library.py",
    "sparse/table/exported_rows.py": "live/test_library.py",
    "sparse/table/placed_rows.py": "live/test_keyed_table.py",
    "sparse/table/placed_marks.py": "live/test_keyed_table.py",
    "live/fbgemm_hooks.py": "live/test_fbgemm.py integrations/test_live_fbgemm.py",
    "live/fbgemm_rules.py": "live/test_fbgemm.py integrations/test_live_fbgemm.py",
    "live/found.py": "live/test_fbgemm.py",
    "live/kinds.py": "live/test_fbgemm.py",
    "live/load_around.py": "integrations/test_live_torchrec.py",
    "live/torch_optimizers.py": "integrations/test_live_torchrec.py",
    "live/devices.py": "live/test_fbgemm.py",
    "live/torchrec.py": "integrations/test_live_torchrec.py",
    "live/torchrec_modules.py": "integrations/test_live_torchrec.py",
    "live/optimizer_slots.py": "live/test_torch_rules.py",
    "load/dense_and_registered.py": "load/test_load.py load/test_dense_optimizers.py",
    "load/live_state.py": "load/test_load.py load/test_chains.py",
    "load/loader.py": "load/test_load.py load/test_bank.py",
    "load/loads.py": "test_saver.py",
    "load/match.py": "load/test_plan.py",
    "load/open_source.py": "load/test_load.py load/test_chains.py",
    "load/optimizer_states.py": "load/test_model_bank.py load/test_other_optimizers.py",
    "load/problems.py": "load/test_plan.py",
    "load/renames.py": "load/test_names.py load/test_plan.py",
    "load/row_loads.py": "load/test_load.py load/test_tensor_rows.py",
    "load/row_optimizer_states.py": "load/test_model_bank.py load/test_other_optimizers.py live/test_optimizers.py",
    "load/rows_of_ranks.py": "load/test_delta_restores.py distributed/test_shared_live_reads.py",
    "load/source.py": "load/test_bank.py load/test_model_bank.py",
    "load/taken.py": "load/test_standby.py manager/test_followed.py",
    "load/tensor_tables.py": "load/test_tensor_rows.py load/test_table_tensors.py",
    "integrations/habits.py": "integrations/test_lightning.py",
    "manager/answers.py": "manager/test_habits.py",
    "manager/at_save.py": "manager/test_windows_and_epochs.py",
    "manager/counting.py": "manager/test_windows_and_epochs.py manager/test_own_checkpoints.py",
    "manager/options.py": "manager/test_attach.py manager/test_manager.py",
    "manager/placement.py": "manager/test_attach.py",
    "manager/reloads.py": "manager/test_windows_and_epochs.py",
    "manager/table_dates.py": "manager/test_windows_and_epochs.py",
    "manager/near_steps.py": "near/test_near_saves.py",
    "manager/resumable.py": "manager/test_manager.py",
    "manager/run_state.py": "manager/test_windows_and_epochs.py",
    "manager/start.py": "manager/test_resume.py manager/test_resume_chains.py",
    "manager/step_arguments.py": "manager/test_windows_and_epochs.py",
    "mirroring/": "mirroring/test_mirror.py",
    "mirroring/reach.py": "mirroring/test_mirror_of_forgotten.py",
    "output_dir/deletion.py": "manager/test_own_checkpoints.py",
    "near/moved_files.py": "near/test_moving.py",
    "near/moves.py": "near/test_moving.py",
    "load/needed_files.py": "near/test_ranks.py",
    "near/finder.py": "near/test_tier.py near/test_ranks.py near/test_hosts_against_a_dict.py",
    "near/whole_files.py": "near/test_ranks.py near/test_near_flips.py",
    "near/here.py": "cli/test_near_command.py inspect/watch/test_near.py",
    "near/clearing.py": "cli/test_near_command.py",
    "near/noted_host.py": "near/test_noted_hosts.py",
    "near/generations.py": "near/test_ranks.py near/test_near_saves.py",
    "near/views.py": "near/test_ranks.py near/test_near_saves.py",
    "near/": "near/test_near_saves.py near/test_tier.py near/test_beside_saves.py",
    "policies/best.py": "policies/test_keep.py",
    "policies/joined_keeps.py": "policies/test_keep.py",
    "output_dir/at_path.py": "output_dir/test_listing.py output_dir/test_delta_listing.py",
    "output_dir/checkpoint_dir.py": "output_dir/test_listing.py",
    "output_dir/claims.py": "output_dir/test_fence.py",
    "output_dir/forget_requests.py": "forgetting/test_forget.py",
    "output_dir/known_mirrors.py": "mirroring/test_mirror_of_forgotten.py",
    "output_dir/near_hosts.py": "near/test_noted_hosts.py",
    "output_dir/notes.py": "near/test_noted_hosts.py mirroring/test_mirror_of_forgotten.py",
    "output_dir/near_at_takeover.py": "near/test_near_saves.py",
    "output_dir/takeover.py": "output_dir/test_fence.py",
    "output_dir/timeline.py": "output_dir/test_latest.py compaction/test_beside_a_trainer.py",
    "output_dir/why_nothing.py": "output_dir/test_listing.py output_dir/test_delta_listing.py",
    "output_dir/writer.py": "save/test_save.py",
    "parallel/ahead.py": "inspect/test_dataset.py",
    "parallel/connection.py": "parallel/test_ranks.py",
    "parallel/one_process.py": "parallel/test_threads.py test_threads_and_forks.py",
    "parallel/outcomes.py": "parallel/test_meetings.py parallel/test_ranks.py",
    "parallel/process_group.py": "parallel/test_ranks.py",
    "policies/bloom.py": "policies/test_admit.py",
    "save/arguments.py": "test_saver.py test_bad_inputs.py",
    "save/check.py": "save/test_decide.py",
    "save/commit.py": "save/test_save.py",
    "save/counted_run.py": "test_saver.py",
    "save/deletion.py": "manager/test_own_checkpoints.py",
    "save/forgetting.py": "manager/test_forget.py",
    "save/job.py": "test_scale.py",
    "save/near_ground.py": "near/test_near_saves.py near/test_beside_saves.py",
    "save/near_metrics.py": "test_telemetry.py",
    "save/near_save.py": "near/test_near_saves.py",
    "save/near_saves.py": "near/test_near_saves.py near/test_agreement.py",
    "save/owners.py": "save/test_decide.py",
    "save/propose.py": "save/test_save.py",
    "save/registration.py": "test_saver.py",
    "save/reports.py": "save/test_save.py test_saver.py",
    "save/state_values.py": "manager/test_manager.py",
    "save/timeline.py": "save/test_save_info.py",
    "save/totals.py": "save/test_save.py",
    "save/write.py": "save/test_save.py",
    "sparse/__init__.py": "test_architecture.py",
    "sparse/average/": "sparse/average/test_models.py sparse/average/test_row_average.py",
    "sparse/files/agreed_passes.py": "distributed/test_shared_reads.py sparse/files/test_loader.py",
    "sparse/files/aligned_rows.py": "inspect/test_lookup.py",
    "sparse/files/arrow_format.py": "sparse/files/test_golden_part.py sparse/files/test_merged_rows.py",
    "sparse/files/chain_counts.py": "save/test_delta_ranks.py inspect/test_verify_chains.py",
    "sparse/files/chain_table.py": "inspect/test_reader_of_chains.py",
    "sparse/files/checked_columns.py": "inspect/test_dataset.py",
    "sparse/files/damaged_part.py": "inspect/test_salvage.py",
    "sparse/files/dataset.py": "inspect/test_dataset.py inspect/test_sql.py",
    "sparse/files/id_check.py": "sparse/files/test_verifier.py",
    "sparse/files/known_ids.py": "sparse/files/test_loader.py load/test_chains.py",
    "sparse/files/link_batches.py": "sparse/table/test_snapshot_machine.py",
    "sparse/files/link_cursors.py": "sparse/files/test_merged_rows.py",
    "sparse/files/link_pass.py": "distributed/test_shared_reads.py sparse/files/test_loader.py",
    "sparse/files/link_reads.py": "distributed/test_shared_reads.py sparse/files/test_loader.py",
    "sparse/files/load_target.py": "sparse/files/test_loader.py distributed/test_shared_live_reads.py",
    "sparse/files/narrowed.py": "save/test_choice.py save/test_reduced.py",
    "sparse/files/owners.py": "sparse/files/test_deal.py",
    "sparse/files/part_writer.py": "sparse/files/test_golden_part.py sparse/files/test_merged_rows.py",
    "sparse/files/ordered_rows.py": "sparse/files/test_saver_repeats.py sparse/table/test_marks_machine.py",
    "sparse/files/reduced_rows.py": "save/test_reduced.py save/test_choice.py",
    "sparse/files/row_index.py": "inspect/test_lookup.py inspect/test_reader_of_chains.py",
    "sparse/files/rows_aside.py": "sparse/files/test_loader.py sparse/files/test_table_target.py",
    "sparse/files/table_fill.py": "sparse/files/test_loader.py",
    "sparse/files/table_reader.py": "inspect/test_reader.py",
    "sparse/optim/": "sparse/optim/test_optim.py",
    "sparse/sharded/": "sparse/sharded/test_table.py",
    "sparse/sharded/shared_gradients.py": "sparse/optim/test_scaling_and_clipping.py sparse/optim/test_joint.py",
    "sparse/table/addresses.py": "sparse/table/test_row_store.py",
    "sparse/table/candidates.py": "sparse/table/test_admission.py",
    "sparse/table/differentiable.py": "sparse/sharded/test_table.py sparse/table/test_table.py",
    "sparse/table/eviction_plan.py": "sparse/table/test_eviction.py",
    "sparse/table/fetch.py": "sparse/sharded/test_table.py sparse/table/test_table.py",
    "sparse/table/first_values.py": "sparse/average/test_models.py sparse/average/test_row_average.py",
    "sparse/table/id_random.py": "sparse/table/test_initializers.py",
    "sparse/table/mark_set.py": "sparse/table/test_marks.py",
    "sparse/table/nested.py": "sparse/table/test_bags.py",
    "sparse/table/nn_module.py": "sparse/table/test_table.py",
    "sparse/table/opaque.py": "sparse/table/test_table.py sparse/test_compile.py",
    "sparse/table/recomputation.py": "sparse/test_recomputation.py",
    "sparse/table/row_table.py": "sparse/average/test_models.py sparse/average/test_row_average.py",
    "sparse/table/observers.py": "sparse/table/test_row_store.py sparse/table/test_marks.py",
    "sparse/table/audited_marks.py": "sparse/table/test_print_marks.py",
    "sparse/table/pre_images.py": "sparse/table/test_snapshot.py",
    "sparse/table/tracker.py": "sparse/table/test_marks.py",
    "sparse/table/store.py": "sparse/table/test_row_store.py",
    "sparse/table/rows.py": "sparse/table/test_row_store.py sparse/table/test_table.py",
    "sparse/table/sharing.py": "sparse/table/test_table.py",
    "sparse/table/slots.py": "sparse/table/test_table.py",
    "sparse/table/torch_embedding.py": "sparse/test_from_torch.py",
    "sparse/table/visits.py": "sparse/table/test_eviction.py",
    "storage/__init__.py": "storage/test_urls.py storage/test_contract.py",
    "storage/base.py": "storage/test_contract.py",
    "storage/remote.py": "storage/test_contract.py storage/test_read_again.py",
    "storage/sftp_files.py": "storage/test_sftp.py",
    "storage/staged_upload.py": "storage/test_work_dir.py",
    "storage/transfers.py": "storage/test_pre_download.py storage/test_work_dir.py",
    "storage/upload.py": "storage/test_objects.py storage/test_s3.py",
    "text/columns.py": "cli/test_terminal.py cli/test_ls.py",
    "text/drawn_bar.py": "text/test_bars.py",
    "text/html.py": "inspect/report/test_report.py inspect/test_pages_in_a_browser.py",
    "text/reprs.py": "test_reprs.py",
}


def sources():
    """Return the source files that do something, by their paths within recckpt."""
    files = sorted((ROOT / "recckpt").rglob("*.py"))
    return [str(file.relative_to(ROOT / "recckpt")) for file in files if not _is_empty(file)]


def _is_empty(file):
    return file.name == "__init__.py" and "def " not in file.read_text()  # a docstring, and what it imports


def named_alike(source):
    """Return the test file with the name of the source file, if there is one."""
    name = Path(source).with_name(f"test_{Path(source).name}")
    return [str(name)] if (ROOT / "tests" / name).exists() else []


def tests_of(source):
    """Return the test files of a source file, by their paths within tests."""
    own = [*named_alike(source), *TESTS.get(source, "").split()]
    return own or TESTS.get(f"{Path(source).parent}/", "").split()


def line_to_add(source):
    """Return the line of TESTS that a source file asks for, with the tests that import it, or what imports it."""
    name = f"recckpt/{source}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    importing = [test for test in sorted((ROOT / "tests").rglob("test_*.py")) if _imports(test, name)]
    tests = [str(test.relative_to(ROOT / "tests")) for test in importing if test.parent.name != "integrations"]
    if not tests:
        users = [other for other in sources() if other != source and _imports(ROOT / "recckpt" / other, name)]
        tests = list(dict.fromkeys(test for user in users for test in tests_of(user)))
    return f'    "{source}": "{" ".join(tests[:2]) or "?"}",'


def _imports(file, module):
    package, _, name = module.rpartition(".")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (
            node.module == module or (node.module == package and any(alias.name == name for alias in node.names))
        ):
            return True
    return False


def main(file):
    """Print the paths of the tests of a file, or the name that is nearest to it."""
    path = Path(file).resolve()
    source = str(path.relative_to(ROOT / "recckpt")) if path.is_relative_to(ROOT / "recckpt") else str(file)
    if source not in sources():
        near = difflib.get_close_matches(source, sources(), 1, 0)
        sys.exit(f"found FILE={file}, expected a source file, such as recckpt/{near[0]}")
    print(*(f"tests/{test}" for test in tests_of(source)))


if __name__ == "__main__":
    main(*sys.argv[1:])
