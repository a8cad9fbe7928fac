"""Draws the learning curves of docs/examples.md, by running the programs.

    python docs/images/learning_curves.py es_quickstart es_pendulum es_physics

Without names it draws all of them. es_physics needs `pip install mujoco-mjx`.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAMS = ("es_quickstart", "es_pendulum", "es_physics")


def draw(program: str) -> None:
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [sys.executable, _ROOT / "examples" / f"{program}.py", f"--out={out}", "--seed=0"],
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            check=True,
        )
        picture = pathlib.Path(out) / "learning_curve.png"
        shutil.copy(picture, pathlib.Path(__file__).with_name(f"{program}.png"))


if __name__ == "__main__":
    for name in sys.argv[1:] or _PROGRAMS:
        draw(name)
