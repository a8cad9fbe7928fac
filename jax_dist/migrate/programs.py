"""Unedited programs, run with other functions in the place of `jax.pmap`."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax_dist
from jax_dist import launch
from jax_dist._usage import MisuseError
from jax_dist.migrate.verify import runs


def run(command: Sequence[str]) -> int:
    """Run a command with `jax_dist.pmap` for `jax.pmap`, in all Python processes it starts.

    Names that newer jax removed, and that have a one-to-one replacement, are put back.

    Returns:
      Its exit code, as a shell counts it.

    Raises:
      MisuseError: it cannot be started.
    """
    return _run(command)


def explain(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command, and return its exit code and `jax_dist.explain` of its mapped functions."""
    with tempfile.TemporaryDirectory(prefix="jax-dist-") as folder:
        path = Path(folder, "reports")
        code = _run(command, explain=str(path))
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    return code, text.split("\0")[:-1]


def _run(command: Sequence[str], **more: Any) -> int:
    library = str(Path(jax_dist.__file__).parents[1])
    with runs.injected(runs.settings(seed=False, library=library, **more)) as folder:
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            code = subprocess.run(command, env=environment, check=False).returncode
        except OSError as error:
            raise MisuseError(f"{command[0]} cannot be started: {error.strerror}") from error
        return launch.shell_code(code)
