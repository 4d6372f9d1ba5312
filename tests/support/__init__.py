"""Helpers of tests, a module each:

bank_runs: Runs whose checkpoints make a model bank: small models whose every value tells which run it is from.
builders: What the tests of the upper half are built from: a small model, a run of it, and its state as bytes.
checkpointing: States for tests of the checkpointers, and how two of them are compared.
chunked: Checkpoints of sharded tensors made without ranks: what each of them would write, cut from whole tensors.
click_runs: Runs that leave checkpoints in ``runs/clicks``, as those of a user whose job does not resume.
conversions: Rows and files that the tests of conversions are made of, and checkpoints read back as numpy arrays.
counting: An optimizer whose steps are easy to foretell.
crowd: Several threads that begin the same work at once.
delta_runs: Output dirs on the disk with a chain: a full checkpoint by recckpt, and deltas by docs/format.md.
devices: Where the tensors of a test lie: on the CPU and, where there is one, on a CUDA device.
disks: Disks that tests need not wait for: nothing of a test is to outlive a loss of power.
documents: The blocks of a page of the documentation: run as one program, or marked with the reason why they are not.
drawn: Properties that hypothesis draws examples for: few in the default suite, many in the slow one.
dying_ranks: Jobs of real ranks of which one dies in a phase of a save; for test_dying_ranks.py: ``dying_ranks.py ROOT
    CASES``.
entered: Looks whether the tests of each source file enter it: ``pytest --entered=FILE``, as ``make test-entered`` does.
fake_fbgemm: A stand-in for FBGEMM's kernels: known by their names, they write rows in backward; weights in UVM have a
    cache.
fake_libraries: Hash tables of libraries that need a GPU, as dicts: with the methods, scores and evictions that adapters
    go by.
fake_torchrec: Stand-ins for what TorchRec makes on GPUs alone: known by their names, with the attributes that recckpt
    reads.
follow_page: Run as a script: follows a page of the documentation in the working directory.
foreign: A table that is not ours.
forge: Checkpoints of tables alone, and damaged ones whose planted fault is the only one.
forgetting: Output dirs whose ids are easy to find in bytes, and the search for them in every file.
forked: Work in children that may crash, hang, or ask for too much memory, and what became of it.
forked_workers: Runs the tests in forks of the process that has collected them: ``pytest --workers=2``, as ``make test``
    does.
gate: Holds work where it calls a method, until it is let through.
halted: Work that halts before or after one of its calls of the local storage, while something else happens.
in_fork: Work in a forked child, and what became of it.
interpreter: What Python does with its arguments, in a process that has begun already.
interrupted_run: A run that trains and saves while Ctrl-C comes every few milliseconds: ``interrupted_run.py DIR STEPS
    HITS HOW``.
killed: Work that is killed at one of its calls of the local storage.
late_storage: A local directory as a network file system shows it: what others have written appears after some looks.
links: Manifests of full checkpoints, deltas and forms that no disk has seen.
live_builders: A training run of live tables: a process as :class:`support.builders.Run`, of which the same is known.
live_collisions: Models of TorchRec whose ids are remapped by managed collision, trained so that ids are evicted and
    come again.
live_reads: A job whose live tables lie on its ranks by rows, on one of them, or as copies.
live_rows: What of live tables has changed, bit for bit, beside what was announced and what was saved.
live_runs: A model of plain embeddings with optimizers of torch, trained at random, and copies of all that it is.
live_torchrec: Models of TorchRec with live tables for the tests: plans, batches, and the state of all ranks in one.
memory_store: A key-value store as ranks share it, in this process.
mirrors: Mirrors held against what they may be: whole at each moment, and byte for byte what their runs have.
mutations: Bytes and JSON that are almost what was written.
near_hosts: A job on several hosts, each a near dir and some processes, that trains what one process could, too.
near_runs: Runs of one small table with near saves: each is a process of its own, as far as files say.
other_user: Another user than root, whose rights are checked, and a directory that this one can enter.
pages: Pages that may hold hostile names: nothing in them runs, and nothing is fetched.
parsed: The syntax trees of recckpt, parsed once a process, where a test asks for them.
paths: Where the tests and their helpers lie, and what a process that a test starts needs to import them.
raising: An exception, or a call as from a signal handler, at every Python line of some files, one after another.
rank_processes: Real ranks: processes under gloo on this machine, forked from one interpreter that has imported
    everything.
recis_files: Writes a RecIS checkpoint as RecIS 1.0 does, by the description of its format alone.
resharding: A job whose rows follow from their ids, for test_resharding.py; as a script, its saves and restores by
    real ranks.
rooms: Ranks that are threads of one process: what they send each other lies in memory.
rotating_run: A run that saves and rotates without a pause, and readers of it; driven by
    faults/test_readers_in_rotation.py.
shared_reads: A job whose ranks save a chain and restore it; as a script, by real ranks, of which one may be killed.
signalled_run: A process that forks runs which are sent signals; driven by test_signals.py and the sweep in
    tests/faults.
spec_reader: Reads the rows of a checkpoint by docs/format.md and nothing else: an independent judge, which knows no
    recckpt.
spec_writer: Writes full checkpoints, deltas and forms by docs/format.md: what recckpt is to write, and damage of it.
stepped: A writer of a snapshot that goes on only when it is told to, so that a table can change at any point of it.
store_bytes: Counts what a remote storage gives of files, to any rank.
sweeps: How far the long tests go, and what of a family of cases the default suite takes.
symptoms: The symptoms of the page for the night, by heading, each with what brings it about and returns what is said
    then.
tests_of: Which test files try a source file; as a script: ``tests_of.py FILE`` prints them, for ``make test-of``.
thread_ranks: Ranks that are threads of this process, and a group of them in memory.
torchrec_models: Models of TorchRec for the tests, with the optimizers that train their tables in the backward pass.
twins: A model with a table and its twin with an ``nn.Embedding`` of the same rows, which SGD trains as one model.
two_ranks: What each of two real processes does for test_group.py: run it as ``two_ranks.py RANK DIR``.
warm_python: Python that has imported torch and recckpt already: processes forked from one interpreter, which starts
    once.
warm_server: An interpreter that has imported all there is and forks processes which run scripts; driven by
    warm_python.py.
watchdog: Says where a test stands that has not ended after a minute, and what keeps a process from ending after its
    tests.
writer_hooks: Hooks for checkpointers, in a module of their own so that the writer process can import them.
"""
