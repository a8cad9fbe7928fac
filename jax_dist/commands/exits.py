"""What a command's exit code means."""

import enum


class Exit(enum.IntEnum):
    """Exit codes, as `--help` lists them."""

    OK = 0
    FINDINGS = 1  # something was found, or would be changed
    USAGE = 2  # misuse, as argparse has it for unknown options; or a fault of jax-dist itself
    INTERRUPTED = 130  # as a shell has it
