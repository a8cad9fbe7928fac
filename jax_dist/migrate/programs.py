"""Runs of unedited programs in which `jax_dist.pmap` replaces `jax.pmap`."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax_dist
from jax_dist import launch
from jax_dist._usage import MisuseError
from jax_dist.migrate.verify import runs


def run(command: Sequence[str], explain: str = "") -> int:
    """Run a command with `jax_dist.pmap` for `jax.pmap`, in all Python processes it starts.

    Names that newer jax removed, and that have a one-to-one replacement, are put back. `explain` is
    the file that gets the reports of `jax_dist.explain`; "": there are none. Returns the exit code,
    as a shell counts it. Raises MisuseError if the command cannot be started.
    """
    library = str(Path(jax_dist.__file__).parents[1])
    with runs.inject_recording(library=library, explain=explain) as folder:
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise MisuseError(f"{command[0]} cannot be started: {error.strerror}") from error
        # Of a Ctrl-C the terminal tells the program itself.
        with launch.handle_signals(lambda n: n != signal.SIGINT and process.send_signal(n)):
            return launch.shell_code(process.wait())


def explain(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command, and return its exit code and `jax_dist.explain` of its mapped functions."""
    with tempfile.TemporaryDirectory(prefix="jax-dist-") as folder:
        path = Path(folder, "reports")
        code = run(command, explain=str(path))
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    return code, text.split("\0")[:-1]  # each report ends with a zero byte
