"""Draw the pictures of docs/examples.md by running the programs that it is about.

python docs/images/es.py
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[1]
_EXAMPLES = _ROOT / "examples"

sys.path[:0] = [str(_ROOT), str(_EXAMPLES)]

import es_common  # noqa: E402  # beside the programs that it runs

_WAYS = {
    "noise drawn, --noise scan": ["--noise=scan"],
    "from a table, --noise table": ["--noise=table", "--comm=scalar"],
}
_SIZE = ["--parameters=10000", "--generations=60"]


def run(program: str, out: pathlib.Path, *options: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    command = [sys.executable, str(_EXAMPLES / program), f"--out={out}", *options]
    subprocess.run(command, env=environment, check=True)


def curve_of(name: str, options: list[str], folder: pathlib.Path) -> tuple:
    out = folder / name.replace(" ", "_").replace(",", "")
    run("es_large.py", out, *_SIZE, *options)
    return es_common.Curve(out, 60, done=60)["loss"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run("es_quickstart.py", folder / "quickstart")
        shutil.copy(folder / "quickstart" / "learning_curve.png", _HERE / "es_quickstart.png")
        run("demo.py", folder / "demo")
        shutil.copy(folder / "demo" / "demo.png", _HERE / "es_demo.png")
        curves = {name: curve_of(name, options, folder) for name, options in _WAYS.items()}
        title = "Rastrigin with 10,000 parameters, 128 mirrored pairs, seed 0"
        picture = es_common.draw_curves(folder, curves, title, "loss for each parameter")
        shutil.copy(picture, _HERE / "es_noise.png")


if __name__ == "__main__":
    main()
