"""`python -m jax_dist` is `jax-dist`."""

import sys

from jax_dist.cli.main import run_as_program

if __name__ == "__main__":
    sys.exit(run_as_program())
