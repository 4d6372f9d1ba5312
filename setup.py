"""Packaging of recckpt; the tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "s3": ["s3fs"],
    "gcs": ["gcsfs"],
    "azure": ["adlfs"],
    "sftp": ["paramiko>=3"],
    "sql": ["polars", "duckdb"],
    "cli": ["rich>=13", "argcomplete>=3.1"],
    "report": ["matplotlib>=3.8"],
    "telemetry": ["opentelemetry-api>=1.30"],
    "cluster": ["dask[distributed]>=2024.8"],
    "lightning": ["lightning>=2.4"],
    "integrations": [
        *("lightning>=2.4", "transformers>=4.46", "accelerate>=1.0"),
        *("tensorboard>=2.16", "mlflow-skinny>=2.16", "wandb>=0.18", "usearch>=2.16"),
        *("pytorch-optimizer>=3.5", "datasets>=3.1"),
    ],
    "test": [
        *("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "pyyaml>=6"),
        *("safetensors>=0.4", "polars>=1.0", "duckdb>=1.1", "pandas>=2.2", "torchdata>=0.11", "omegaconf>=2.3"),
        *("rich>=13", "argcomplete>=3.1", "matplotlib>=3.8", "selenium>=4.25"),
        *("opentelemetry-sdk>=1.30", "opentelemetry-exporter-prometheus>=0.51b0"),
        "redis>=5",
        *("s3fs>=2024.12", "moto[server]>=5.0.12", "paramiko>=3", "dask[distributed]>=2024.8"),
    ],
    "lint": ["ruff>=0.6", "mypy>=1.11"],
    "bench": ["safetensors>=0.4"],
    "examples": ["matplotlib>=3.8", "opentelemetry-sdk>=1.30", "opentelemetry-exporter-prometheus>=0.51b0"],
}

ROOT = Path(__file__).parent
URL = "https://recckpt.invalid/recckpt"  # a placeholder: packaging/ready.py refuses to release with it
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "recckpt/__init__.py").read_text("utf-8"), re.MULTILINE)[1]
README = re.sub(  # links that lead somewhere from the page of the registry too
    r"\]\((?!https?:)", f"]({URL}/blob/v{VERSION}/", (ROOT / "README.md").read_text("utf-8")
)

setup(
    name="recckpt",
    version=VERSION,
    author="the recckpt developers",
    url=URL,
    project_urls={
        "Documentation": f"{URL}/docs",
        "Source": URL,
        "Changelog": f"{URL}/blob/v{VERSION}/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    },
    description="Checkpoints for recommendation models: hashtable embeddings and dense tensors",
    long_description=README,
    long_description_content_type="text/markdown",
    keywords="checkpoint pytorch recommender embedding hashtable arrow recis torchrec",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["recckpt", "recckpt.*"]),
    package_data={"recckpt": ["py.typed"]},
    install_requires=[
        "torch>=2.13",
        "numpy>=1.26",
        "pyarrow>=17",
        "fsspec>=2024.12",  # before, a put could not be asked to fail where the name is taken
        "tqdm>=4.66",
        "numba>=0.60",
        "xxhash>=3.4.1",
        "msgspec>=0.19",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["recckpt = recckpt.cli:main"]},
)
