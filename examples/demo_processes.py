"""The processes of the demo: each trains with one program, and says how far it is."""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

_WORKER = pathlib.Path(__file__).with_name("demo_worker.py")
_PATIENCE = 5.0  # seconds for a process to end when it is asked to

Follow = Callable[["Run", int, float], None]  # of a run: the generations done, the mean return


@dataclasses.dataclass
class Run:
    """One program, and what was measured of it."""

    label: str
    program: str  # a path
    colour: str
    looked_into: bool = True  # whether to measure the program itself, which compiles it again
    curve: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # (seconds, return)
    trained: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    again: dict[str, Any] = dataclasses.field(default_factory=dict)  # with the cache

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Workers:
    """Starts processes; when this ends, however it ends, they are ended too.

    Args:
      folder: for the compilation cache and for what the processes complain of.
      devices: how many each of them simulates.
      seed: of all of them.
    """

    def __init__(self, folder: pathlib.Path, *, devices: int, seed: int):
        self._folder = folder
        self._options = (f"--devices={devices}", f"--seed={seed}", f"--cache_folder={folder}/cache")
        self._processes: list[subprocess.Popen] = []
        self._turn = threading.Lock()  # of one program at a time, so that all have the machine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process in self._processes:
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def ask(self, program: str, *options: str) -> dict[str, Any]:
        """The last thing that a process says."""
        return list(self._events(program, *options))[-1]

    def train(self, runs: list[Run], generations: int, follow: Follow) -> None:
        """All runs, step by step in turns."""

        def one(run: Run) -> None:
            facts = "--facts" if run.looked_into else "--nofacts"
            for event in self._events(run.program, f"--generations={generations}", facts):
                kind = event.pop("event")
                if kind == "generation":
                    run.curve.append((event["seconds"], event["mean_return"]))
                    follow(run, event["number"], event["mean_return"])
                else:
                    setattr(run, kind, event)

        _all_at_once(one, runs)

    def start_again(self, runs: list[Run]) -> None:
        """All runs, for three generations."""

        def one(run: Run) -> None:
            run.again = self.ask(run.program, "--generations=3", "--nofacts")

        _all_at_once(one, runs)

    def _events(self, program: str, *options: str) -> Iterator[dict[str, Any]]:
        complaints = self._folder / f"errors_{len(self._processes)}.txt"
        command = [
            sys.executable,
            str(_WORKER),
            program,
            "--in_turns",
            *self._options,
            *options,
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with complaints.open("w") as errors:
            process = subprocess.Popen(command, **pipes, stderr=errors, text=True)
        self._processes.append(process)
        with contextlib.ExitStack() as turn:
            for line in process.stdout:
                turn.close()  # it has done what it was ready for
                event = json.loads(line)
                if event["event"] == "ready":
                    turn.enter_context(self._turn)
                    with contextlib.suppress(BrokenPipeError):  # it failed, which is told below
                        print(file=process.stdin, flush=True)
                else:
                    yield event
        if process.wait() != 0:
            raise RuntimeError(f"{' '.join(command)}\n{complaints.read_text()}")


def _all_at_once(one: Callable[[Run], None], runs: list[Run]) -> None:
    errors: list[BaseException] = []

    def guarded(run: Run) -> None:
        try:
            one(run)
        except RuntimeError as error:  # a process failed; raised below, in the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
