"""`python -m jax_dist` is `jax-dist`."""

import sys

from jax_dist.cli.cli import program

if __name__ == "__main__":
    sys.exit(program())
