"""`python -m jax_dist` is `jax-dist`."""

import sys

from jax_dist.commands.cli import program

if __name__ == "__main__":
    sys.exit(program())
