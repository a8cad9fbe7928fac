"""What a command's exit code means."""

import enum


class Exit(enum.IntEnum):
    """Exit codes, as `--help` lists them."""

    OK = 0
    USAGE = 2  # what argparse gives for unknown options
