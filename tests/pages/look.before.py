"""The page compares a checkpoint of the quick start with one of another run."""

import shutil

shutil.copytree("runs/clicks", "runs/ads")
