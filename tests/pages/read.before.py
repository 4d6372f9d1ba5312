"""The page reads the run of the quick start, whose best checkpoint has a metric, and compares it with another run."""

import shutil

go_on_after("README.md")
manager.step()
manager.save(metrics={"auc": 0.71})
shutil.copytree("runs/clicks", "runs/ads")
