"""The page reads the run of the quick start, finds its best checkpoint by a metric, and compares it with another run."""

import shutil

go_on_after("README.md")
manager.step()
manager.save(metrics={"auc": 0.71})
shutil.copytree("runs/clicks", "runs/ads")
