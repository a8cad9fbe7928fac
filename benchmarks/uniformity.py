"""What is said to be the same on all devices, beside what is: the values of hundreds of programs.

    python benchmarks/uniformity.py                     # six sets, some minutes
    python benchmarks/uniformity.py --only steps,fuzz

Each program runs on 8 simulated devices (6 for some), for two sets of numbers. "found" are values
that are equal on all devices and said to be, "wrong" those that are said to be equal and are not:
there must be none. What is missed is listed by the primitive that made it.
"""

import argparse
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jax_dist.testing import simulated_devices

_TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(_TESTS / "passes"), str(_TESTS / "global_views")]
from uniformity_truth import Count, Subject, measured  # noqa: E402

_EIGHT = {"i": 8}


def _steps() -> Iterator[Subject]:
    import training_steps as steps

    for name, (step, state) in steps.STEPS.items():
        yield Subject(name, step, (state, steps.BATCH), (True, False), _EIGHT)


def _cases() -> Iterator[Subject]:
    from gather_cases import CASES

    x = np.random.default_rng(1).normal(size=(8, 2, 3)).astype(np.float32)
    for case in CASES:
        yield Subject(case.name, case.body, (x,), (False,), _EIGHT)


def _fuzz() -> Iterator[Subject]:
    import fuzzing

    for seed in range(60):
        sizes = {"i": 4} if seed // 10 % 2 else {"i": 2, "j": 3}
        make = lambda x, seed=seed, axes=tuple(sizes): fuzzing.values_from(x, seed, axes)
        x = np.random.default_rng(seed).normal(size=(np.prod([*sizes.values()]), 2, 3, 2))
        yield Subject(f"fuzz {seed}", make, (x.astype(np.float32),), (False,), sizes)


def _drawn() -> Iterator[Subject]:
    import drawn_steps as drawn

    for seed in range(24):
        args = drawn.state_of(seed), drawn.batch_of(seed)
        yield Subject(f"drawn {seed}", drawn.step_of(seed), args, (True, False), _EIGHT)


def _probes() -> Iterator[Subject]:
    from probes import PROBES

    rng = np.random.default_rng(2)
    args = [rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (8, 8, 16))]
    for name, function in PROBES.items():
        yield Subject(name, function, tuple(args), (True, False), _EIGHT)


def _library() -> Iterator[Subject]:
    for name in ("collective", "bodies", "library", "random"):
        for probe in importlib.import_module(f"probes_{name}").PROBES:
            if probe.refused is None:
                shared = tuple(n in probe.shared for n in range(len(probe.args)))
                yield Subject(probe.name, probe.step, probe.args, shared, _EIGHT)


SETS: dict[str, Callable[[], Iterator[Subject]]] = {
    "steps": _steps,
    "cases": _cases,
    "fuzz": _fuzz,
    "drawn": _drawn,
    "probes": _probes,
    "library": _library,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", default=",".join(SETS), help="sets, such as steps,fuzz")
    simulated_devices(8)
    print(f"jax {jax.__version__}\n{'set':10}{'programs':>9}{'equal':>7}{'found':>7}{'wrong':>7}")
    for name in parser.parse_args().only.split(","):
        count, programs, left_out = Count(), 0, []
        for subject in SETS[name]():
            try:
                count.add(measured(subject))
            except Exception as error:  # noqa: BLE001  # of a program that this jax cannot run so
                left_out.append(f"{subject.name} ({type(error).__name__})")
                continue
            programs += 1
        wrong = sum(count.wrong.values())
        print(f"{name:10}{programs:>9}{count.equal:>7}{count.found:>7}{wrong:>7}", flush=True)
        for what, counted in (("wrong", count.wrong), ("missed", count.missed)):
            if counted:
                print(f"  {what}: {', '.join(f'{n} {name}' for name, n in counted.most_common())}")
        if left_out:
            print(f"  left out: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
