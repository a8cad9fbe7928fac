"""What the other processes see when one fails, and after how long: plain JAX against ours.

    python benchmarks/failures.py [TROUBLE ...]

Each trouble is had by one of two processes on this machine while the other one waits for it in a
collective. Plain JAX is stopped after a while, where it would go on waiting.
"""

import argparse
import pathlib
import signal
import sys

import jax

_TESTS = pathlib.Path(__file__).parents[1] / "tests" / "multihost"
sys.path.insert(0, str(_TESTS))
from jobs import Ended, run_job  # noqa: E402  # beside the tests, which check what this measures

_TROUBLES = ("raises", "exits", "is killed", "crashes", "is interrupted")
_PATIENCE = 40.0  # seconds, for plain JAX


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("troubles", nargs="*", default=_TROUBLES, metavar="TROUBLE")
    options = parser.parse_args()
    print(f"jax {jax.__version__}; seconds from the trouble to the end of the other process")
    print(f"{'trouble':<16}{'rank':<6}{'with':<10}{'seconds':>8}  how the other one ended")
    for trouble in options.troubles:
        for rank in (1, 0):
            for plain in (True, False):
                print(_row(trouble, rank, plain=plain), flush=True)


def _row(trouble: str, rank: int, *, plain: bool) -> str:
    environment = {"JAX_DIST_PLAIN": "1"} if plain else {}
    ended = run_job(
        "troubled_program.py", str(rank), trouble, environment=environment, timeout=_PATIENCE
    )
    other = ended[1 - rank]
    name = "jax" if plain else "jax_dist"
    return f"{trouble:<16}{rank:<6}{name:<10}{other.seconds:>8.1f}  {_how(other)}"


def _how(ended: Ended) -> str:
    if ended.code == -signal.SIGALRM:
        return "still waiting"
    said = [line for line in ended.output.splitlines() if ": stopping because" in line]
    if said:
        return f"exit code {ended.code}: {said[0].partition(': stopping because ')[2][:60]}"
    if ended.code < 0:
        return signal.Signals(-ended.code).name
    return f"exit code {ended.code}"


if __name__ == "__main__":
    main()
