"""What each subcommand of `jax-dist cache` does with its options."""

import argparse
import dataclasses
import importlib
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from jax_dist._exceptions import text_of
from jax_dist._usage import MisuseError, human_bytes
from jax_dist.cache import entries, store, verification
from jax_dist.cache.diagnosis import doctor
from jax_dist.cache.verification import CacheVerification, ProgramVerdict, VerificationRun
from jax_dist.commands import terminal
from jax_dist.commands.terminal import Exit

_TAIL = 20  # lines of a program that failed
_GREEN, _RED, _CYAN, _PLAIN = "\x1b[32m", "\x1b[1;31m", "\x1b[36m", "\x1b[0m"
_CODE = re.compile(r"^JXD\d+")
_HELP = re.compile(r"^help:", re.MULTILINE)
_DAY = 86400


def _print_json(out: TextIO, facts: object) -> Exit:
    print(json.dumps(facts, indent=2), file=out)
    return Exit.OK


def _verify(options: argparse.Namespace, out: TextIO, err: TextIO) -> Exit:
    from jax_dist.codemod.verify import recording

    if not options.program:
        raise MisuseError("verify needs a command: jax-dist cache verify -- python train.py")
    try:
        with (
            terminal.ProgressLine(err, "runs done") as progress,
            tempfile.TemporaryDirectory(prefix="jax-dist-verify-") as folder,
        ):
            found = verification.verify(
                options.program,
                Path(folder),
                Path(recording.__file__).with_name("bootstrap.py"),
                runs=options.runs,
                timeout=options.timeout,
                progress=progress,
            )
    except OSError as error:
        raise MisuseError(f"{options.program[0]} cannot be started: {error.strerror}") from error
    except ValueError as error:  # a record of another version
        raise MisuseError(str(error)) from error
    if options.json:
        facts = dataclasses.asdict(found) | {"is_clean": found.is_clean}
        print(json.dumps(facts, indent=2), file=out)
    else:
        colour = terminal.wants_colour(options.color, out)
        out.writelines(f"{line}\n" for line in _verdict_lines(found, colour=colour))
    err.writelines(f"{line}\n" for line in _failed_runs(found.runs))
    return Exit.OK if found.is_clean else Exit.FINDINGS


def _verdict_lines(found: CacheVerification, *, colour: bool) -> Iterator[str]:
    def painted(text: str, with_: str) -> str:
        return f"{with_}{text}{_PLAIN}" if colour else text

    width = max((len(each.function) for each in found.functions), default=0)
    hits = [each for each in found.functions if each.verdict is ProgramVerdict.HIT]
    misses = [each for each in found.functions if each.verdict is not ProgramVerdict.HIT]
    for each in (*hits, *misses):  # one reads the end of a long table
        verdict = painted(each.verdict, _GREEN if each in hits else _RED)
        times = f" ({each.programs} programs)" if each.programs > 1 else ""
        yield f"{each.function:{width}}  {verdict}{times}"
        for finding in each.findings:
            text = _CODE.sub(lambda code: painted(code[0], _RED), str(finding))
            text = _HELP.sub(lambda help_: painted(help_[0], _CYAN), text)
            yield textwrap.indent(text, "    ")
    hit, programs = (sum(each.programs for each in some) for some in (hits, found.functions))
    if programs:
        noun = "program is" if programs == 1 else "programs are"
        yield f"{hit} of {programs} {noun} found again, in {len(found.runs)} runs."
    elif all(run.exit_code == 0 for run in found.runs):
        yield (
            "Nothing was compiled, so nothing is proved: does the command run Python, without -E, "
            "-I or -S, and does that import jax?"
        )


def _failed_runs(runs: tuple[VerificationRun, ...]) -> Iterator[str]:
    for number, each in enumerate(runs, start=1):
        match each.exit_code:
            case 0:
                continue
            case None:
                ended = "was stopped after --timeout"
            case code if code > 0:
                ended = f"ended with exit code {code}"
            case code:
                ended = f"was ended by signal {-code}"
        yield from each.output.splitlines()[-_TAIL:]
        yield f"jax-dist cache verify: run {number} {ended}"


def _ls(options: argparse.Namespace, out: TextIO, err: TextIO) -> Exit:
    path = Path(store.chosen(options.folder, os.environ))
    found = [entry for entry in entries.all_of(path) if options.function in (None, entry.function)]
    found.sort(key=lambda entry: (-entry.size, entry.key))
    if options.json:
        return _print_json(out, [entry.to_dict() for entry in found])
    now, rows = time.time(), []
    for entry in found:
        seconds = entry.compile_seconds()
        rows.append(
            (
                entry.function,
                entry.key.rpartition("-")[2][:12],
                human_bytes(entry.size),
                "damaged" if seconds is None else f"{seconds} s",
                _ago(now - entry.written),
                _ago(now - entry.used) if entry.repeated else "never",
            )
        )
    if rows:
        head = ("function", "key", "size", "compiled in", "written", "used")
        print(entries.table(head, rows, numbers=(2, 3)), file=out)
    noun = "program" if len(found) == 1 else "programs"
    size = human_bytes(sum(entry.size for entry in found))
    print(f"{path}: {len(found)} {noun}, {size}", file=out)
    return Exit.OK


def _ago(seconds: float) -> str:
    days = int(seconds // _DAY)
    if days > 0:
        return f"{days} d ago"
    return "today" if seconds >= 3600 else "just now"


def _doctor(options: argparse.Namespace, out: TextIO, err: TextIO) -> Exit:
    health = doctor(options.folder, fix=options.fix)
    print(json.dumps(health.to_dict(), indent=2) if options.json else health, file=out)
    return Exit.OK if health.healthy else Exit.FINDINGS


def _prune(options: argparse.Namespace, out: TextIO, err: TextIO) -> Exit:
    if options.max_size is None and options.older_than is None:
        raise MisuseError("prune needs --max-size, --older-than, or both")
    pruned = store.prune(
        Path(store.chosen(options.folder, os.environ)),
        max_size=options.max_size,
        older_than=options.older_than,
        dry_run=options.dry_run,
    )
    if options.json:
        facts = {
            "removed": [entry.key for entry in pruned.removed],
            "removed_bytes": pruned.bytes,
            "kept": pruned.kept,
            "kept_bytes": pruned.kept_bytes,
            "dry_run": options.dry_run,
        }
        return _print_json(out, facts)
    verb = "would remove" if options.dry_run else "removed"
    print(
        f"{verb} {len(pruned.removed)} ({human_bytes(pruned.bytes)}), "
        f"kept {pruned.kept} ({human_bytes(pruned.kept_bytes)})",
        file=out,
    )
    return Exit.OK


def _warm(options: argparse.Namespace, out: TextIO, err: TextIO) -> Exit:
    if ":" not in options.programs:
        raise MisuseError(f"{options.programs} names no function; write programs.py:programs")
    with terminal.ProgressLine(err, "compiling"):
        return _warmed(options, out, err)


def _warmed(options: argparse.Namespace, out: TextIO, err: TextIO) -> Exit:
    if options.processes > 1:
        found = _in_processes(options)
    else:
        import jax

        if options.devices is not None:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", options.devices)
        found = _warm_all(options.programs, options.cache)
    if options.json:
        print(json.dumps(found, indent=2), file=out)
    else:
        out.writelines(f"{each['text']}\n" for each in found)
    return Exit.OK if found and all(each["cached"] for each in found) else Exit.FINDINGS


def _in_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    from jax_dist._test_processes import run_processes  # this process itself needs no jax

    outcomes = run_processes(
        _warm_all,
        options.programs,
        options.cache,
        processes=options.processes,
        cpu_devices=options.devices or 1,
        timeout=86400.0,
    )
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [
        each | {"rank": outcome.rank, "text": f"process {outcome.rank}: {each['text']}"}
        for outcome in outcomes
        for each in outcome.value
    ]


def _warm_all(name: str, folder: str | None) -> list[dict[str, Any]]:
    """Warms all programs that a function yields; what became of each, as plain data."""
    from jax_dist import cache

    programs = _programs(name)  # first: nothing is switched on for a name that is not there
    if folder is None:
        cache.enable()
    else:
        cache.enable(folder)
    found = []
    for program in programs:
        warmed = cache.warm(*program)
        found.append(
            {
                "function": warmed.function,
                "hit": warmed.hit,
                "written": warmed.written,
                "cached": warmed.hit or warmed.written,
                "seconds": round(warmed.seconds, 3),
                "text": str(warmed),
            }
        )
    return found


def _programs(name: str) -> Iterable[tuple[Any, ...]]:
    place, _, function = name.rpartition(":")
    sys.path.insert(0, os.getcwd())
    if place.endswith(".py"):
        path = Path(place)
        sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
        place = path.stem
    try:
        programs = getattr(importlib.import_module(place), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise MisuseError(f"{name} cannot be found: {text_of(error)}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {text_of(error)}"
        raise MisuseError(f"{place} cannot be imported: {said}") from error
    return programs()


# By the name of the subcommand.
RUNS: dict[str, Callable[[argparse.Namespace, TextIO, TextIO], Exit]] = {
    "verify": _verify,
    "ls": _ls,
    "doctor": _doctor,
    "prune": _prune,
    "warm": _warm,
}
