"""Writes an edition of the golden files, once: ``python tests/golden/write.py EDITION``; CONTRIBUTING.md says when.

What an edition holds is never written again: every later recckpt is to read these very bytes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("edition", type=int, help="a number; docs/format.md, section 10, lists them")
    to = HERE / str(parser.parse_args().edition)
    if to.exists():
        sys.exit(f"{to} is there: an edition is written once, and read for ever. A changed format is a new edition.")
    with tempfile.TemporaryDirectory() as name:
        written = Path(name) / "written"
        written.mkdir()
        write(written)
        shutil.copytree(written, to)
    print(f"{to}: {sum(1 for _ in to.glob('*/expected.json'))} families")


def write(to: Path) -> None:
    """Write all families to an empty directory."""
    import torch  # after main() has refused what it refuses
    from golden.families import FAMILIES, Scene

    from recckpt import __version__

    for name, family in FAMILIES.items():
        (to / name).mkdir()
        scene = Scene(to / name)
        family.write(scene)
        scene.save(to / name / "expected.json")
    shutil.rmtree(to / "source")
    path = ":".join([str(HERE.parent), str(HERE.parents[1])])
    subprocess.run(
        [sys.executable, HERE / "of_ranks.py", to], check=True, env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}
    )
    for left in to.glob("*-*"):
        left.unlink()
    (to / "written_by.json").write_text(json.dumps({"recckpt": __version__, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
