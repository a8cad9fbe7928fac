"""Programs for TPUs and GPUs, made by their compilers, without the hardware.

    python benchmarks/machines.py                          # v5e, v5p and, with jax[cuda12], H100
    python benchmarks/machines.py --on v5e:4x4 --only same,better
    python benchmarks/machines.py --on v5e:4x4 --only memory --picture docs/pictures/plan.svg

It needs `pip install 'jax[tpu]'`, or `jax[cuda12]`, and no such device. Four tables:

    same    the programs of jax.pmap and of jax_dist.pmap, instruction for instruction
    better  programs that differ: gathers that are reduced, and a pair of evolution strategies
    memory  a transformer in each way: arguments, temporaries and peak, collectives, cycles
    passes  what a custom_partitioning operation costs before and after `rewrite`

Nothing is run, so that no time of a step is known; cycles are the compiler's own estimate.
"""

import argparse
import collections
import importlib
import pathlib
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import machine_programs
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.machines.cost import ProgramCost
from jax_dist.machines.plans import plan
from jax_dist.machines.report import Plan
from jax_dist.machines.steps import MappedStep

MACHINES = ("v5e:2x2", "v5e:4x4", "v5p:2x2x2", "h100:1x8", "h100:2x8")
TABLES = ("same", "better", "memory", "passes")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--on", default=",".join(MACHINES), help="machines, with commas between")
    parser.add_argument("--only", default=",".join(TABLES), help="tables, with commas between")
    parser.add_argument("--picture", help="where to write a picture of the memory, as SVG")
    options = parser.parse_args()
    for name in options.on.split(","):
        try:
            machine = jax_dist.topology(name)
        except ImportError as error:
            print(f"SKIPPED {name}: {str(error).splitlines()[-1]}\n")
            continue
        for table in options.only.split(","):
            print(f"== {table}, {name}: {len(machine.devices)} devices, {machine.hosts} hosts")
            found = globals()[f"{table}_on"](machine)
            if options.picture and isinstance(found, Plan):
                with open(options.picture, "w") as file:
                    file.write(found.picture())
            print(flush=True)


# ---- the same programs


def instructions(compiled: jax.stages.Compiled) -> collections.Counter[str]:
    """Of the optimised program: no names, no lines of the source."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text() or "")
    lines = [line.strip() for line in text.splitlines() if " = " in line]
    return collections.Counter(re.sub(r"%[\w.\-]+", "%", line) for line in lines)


def both(program: machine_programs.Program, machine: Any) -> list[Any]:
    """The program by jax.pmap and by jax_dist.pmap: lowered."""
    types = program.mapped_types(len(machine.devices))
    options = {"axis_name": "i", "devices": machine.devices, **program.options}
    return [way(program.fun, **options).lower(*types) for way in (jax.pmap, jax_dist.pmap)]


def same_on(machine: Any) -> None:
    listed = machine_programs.same_programs(len(machine.devices))
    listed["transformer with adamw, donated"] = machine_programs.transformer(machine_programs.SMALL)
    for name, program in listed.items():
        theirs, ours = (instructions(each.compile()) for each in both(program, machine))
        differs = sum(((theirs - ours) | (ours - theirs)).values())
        verdict = f"{differs} differ" if differs else "identical"
        print(f"  {name:36} {theirs.total():6} instructions  {verdict}", flush=True)


# ---- better ones


def line(way: str, cost: ProgramCost) -> str:
    """A way of a program: its memory, what it sends, and the compiler's estimate."""
    kinds = collections.Counter[str]()
    for each in cost.collectives:
        kinds[each.kind] += each.count
    sent = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    cycles = "" if cost.cycles is None else f"{cost.cycles / 1e3:10.1f} k cycles"
    return (
        f"    {way:24} peak {(cost.peak_bytes or 0) / 1e6:9.3f} MB  moved "
        f"{cost.moved_bytes / 1e6:9.3f} MB{cycles}  {sent}"
    )


def better_on(machine: Any) -> None:
    for name, program in machine_programs.better_programs().items():
        print(f"  {name}")
        for way, lowered in zip(("jax.pmap", "jax_dist.pmap"), both(program, machine), strict=True):
            print(line(way, ProgramCost.of(lowered)), flush=True)
    print("  evolution strategies with a table of 64 MB, examples/es_before_pmap.py")
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
    es = importlib.import_module("es_before_pmap")
    update, args = es.example_update(0, 2)
    step = MappedStep.of_mapped(update, args, {})
    for name, way in {"jax.pmap": jax.pmap, "jax_dist.pmap": jax_dist.pmap}.items():
        mapped = step.mapped(way, machine.devices)
        cost = ProgramCost.of(mapped.lower(*step.leaves(len(machine.devices))))
        print(line(name, cost), f" {cost.constants_bytes / 1e6:.0f} MB of constants", flush=True)


# ---- the memory of a transformer


def memory_on(machine: Any) -> Plan:
    start = time.perf_counter()
    program = machine_programs.transformer(machine_programs.LARGE)
    mapped = jax.pmap(program.fun, "i", **program.options)
    found = plan(mapped, *program.mapped_types(len(machine.devices)), on=machine)
    print(found)
    print(f"  {time.perf_counter() - start:.0f} s for all")
    return found


# ---- custom_partitioning


@custom_partitioning
def scaled(x: jax.Array, y: jax.Array) -> jax.Array:
    """An operation that any part of the rows can compute, as kernels are."""
    return jnp.tanh(x) * y


scaled.def_partition(
    partition=lambda mesh, args, result: (
        mesh, lambda x, y: jnp.tanh(x) * y, args[0].sharding, (args[0].sharding,) * 2,
    ),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="i j, i j -> i j",
)  # fmt: skip


def passes_on(machine: Any) -> None:
    mesh = jax.sharding.Mesh(machine.devices, ("i",))
    types = [
        jax.ShapeDtypeStruct(
            (16 * len(machine.devices), 1024), np.float32, sharding=NamedSharding(mesh, P("i"))
        )
    ] * 2
    function = jax.jit(lambda x, y: scaled(x, y) @ jnp.ones((1024, 8)))
    for way, made in {"jax.jit": function, "rewrite": jax_dist.rewrite(function)}.items():
        try:
            lowered = made.lower(*types)
            kept = "CustomSPMDPartitioning" in lowered.as_text()
            print(line(way, ProgramCost.of(lowered)), "holds an address" if kept else "")
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            print(f"    {way:24} {str(error).splitlines()[0][:100]}")


if __name__ == "__main__":
    main()
