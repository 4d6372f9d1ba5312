"""What is installed is tested; `make test-integrations` installs all of it."""

from importlib.util import find_spec

NEEDS = {
    "test_lightning.py": "lightning",
    "test_transformers.py": "transformers",
    "test_accelerate.py": "accelerate",
    "test_clipping_accelerate.py": "accelerate",
    "test_clipping_lightning.py": "lightning",
    "test_clipping_transformers.py": "transformers",
    "test_lightning_averages.py": "lightning",
    "test_lightning_resumes.py": "lightning",
    "test_transformers_resumes.py": "transformers",
    "test_live_tables.py": "lightning",
    "test_live_fbgemm.py": "fbgemm_gpu",
    "test_live_collisions.py": "torchrec",
    "test_live_torchrec.py": "torchrec",
    "test_torchrec.py": "torchrec",
    "test_train_torchrec.py": "torchrec",
    "test_usearch.py": "usearch",
}
collect_ignore = [name for name, library in NEEDS.items() if find_spec(library) is None]
