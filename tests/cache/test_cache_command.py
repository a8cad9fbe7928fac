"""`jax-dist cache`: without a subcommand, and without jax."""

import io
import os
import pathlib
import subprocess
import sys

from jax_dist.cli import main as cli


def test_without_a_subcommand_the_help_is_printed():
    out, err = io.StringIO(), io.StringIO()

    assert cli.main(["cache"], out=out, err=err) == 2
    assert out.getvalue() == ""
    assert "\n    verify " in err.getvalue()


def test_a_command_that_cannot_be_started_loads_no_jax(tmp_path):
    program = (
        "import atexit, sys\n"
        "loaded = lambda: sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules))\n"
        "atexit.register(lambda: print(loaded()))\n"
        "from jax_dist.cli.main import main\n"
        "main(['cache', 'verify', '--', '/no/such/program'])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stderr
