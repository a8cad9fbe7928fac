"""A Python that has imported jax and forks for each program; run as a script.

What such a program costs is what it does itself, without the half second of CPU for the import.
Whatever begins after the import begins anew in each: backends, flags of XLA, threads, memory.

Each line of its input is a request in JSON: `{"program": [FILE, ARGUMENT, ...], "variables": {}}`,
or `{"shell": SCRIPT}`. Once it has ended, one line tells its exit code and what it printed.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from typing import IO, NoReturn

import jax  # noqa: F401 - the programs need it


def main() -> None:
    gc.collect()
    gc.freeze()  # a collection in a fork would touch it all
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            request = json.loads(line)
            if "shell" in request:
                command = ["sh", "-ec", request["shell"]]
                code = subprocess.run(command, stdout=out, stderr=err, check=False).returncode
            elif (child := os.fork()) == 0:
                _run(request["program"], request["variables"], out, err)
            else:
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            answer = {"code": code, "out": _text(out), "err": _text(err)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _run(program: list[str], variables: dict[str, str], out: IO[bytes], err: IO[bytes]) -> NoReturn:
    """In the fork, for two minutes at most."""
    signal.alarm(120)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.environ.update(variables)
    sys.argv = program
    code = 1
    try:
        runpy.run_path(program[0], run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001 - as Python does it
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # an end as usual would touch, and so copy, all that was imported


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


if __name__ == "__main__":
    main()
