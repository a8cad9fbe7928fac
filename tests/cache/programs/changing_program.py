"""A small program that differs from run to run in what stands around its functions.

python changing_program.py COUNTER CHANGE ...: COUNTER is a file that counts the runs; each CHANGE
names something that every run but the first does differently.
"""

import os
import pathlib
import sys

SOURCE = """
import jax

@jax.jit
def step(x):
    y = x * 2
    return y + 1
"""


def changes(counter):
    """{name: what it does}, in a run after the first."""
    elsewhere = counter.with_suffix(".elsewhere")
    return {
        "flag": lambda: add_flag("--xla_cpu_enable_fast_math=true"),
        "default_flag": lambda: add_flag("--xla_cpu_enable_fast_math=false"),
        "argument": lambda: sys.argv.append("--xla_cpu_enable_fast_math=true"),
        "dump": lambda: add_flag(f"--xla_dump_to={counter}.dump --xla_dump_hlo_as_text"),
        "nans": lambda: os.environ.update(JAX_DEBUG_NANS="1"),
        "tracebacks": lambda: os.environ.update(JAX_TRACEBACK_FILTERING="off"),
        "folder": lambda: (elsewhere.mkdir(exist_ok=True), os.chdir(elsewhere)),
        "path": lambda: None,
        "lines": lambda: None,
    }


def add_flag(flag):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def main(counter, *names):
    counter = pathlib.Path(counter).resolve()
    number = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(number + 1))
    known = changes(counter)
    for name in names if number else ():
        known[name]()
    above = 7 * number if "lines" in names else 0
    file = f"{counter.parent}/{number if 'path' in names else 0}/step.py"
    space = {}
    exec(compile("\n" * above + SOURCE, file, "exec"), space)
    import numpy as np

    space["step"](np.ones(8, np.float32))


if __name__ == "__main__":
    main(*sys.argv[1:])
