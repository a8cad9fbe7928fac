"""Training steps under pmap, shard_map and the global view: numbers, memory, what is sent, time.

    python benchmarks/global_view.py                          # six workloads, some minutes
    python benchmarks/global_view.py --all                    # and all below, with `jax[tpu]`
    python benchmarks/global_view.py --only mlp,transformer
    python benchmarks/global_view.py --processes 2 --only mlp,transformer
    python benchmarks/global_view.py --only bodies,hsdp,model     # compiled only, seconds
    python benchmarks/global_view.py --on v5e:4x4,v5e:16x16       # for TPUs, with `jax[tpu]`

All ways of a workload run in one process, on 8 simulated CPU devices, so that ratios mean something
on a busy machine. Time is CPU time of the whole process, the least of some steps; memory is that of
the compiled program's own analysis, and "held" what the live arrays of one device take. "by hand"
is FSDP as one writes it: parameters gathered, gradients scattered, and an update on one eighth.
With several processes, the figures are those of the first. The programs of `state_programs` are
only compiled: optimizers in branches and loops, groups, and a further axis of the mesh. Those of
`state_machines` are compiled for TPUs, each way for the state to lie beside GSPMD by hand.
"""

import argparse
import dataclasses
import gc
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from machine_programs import GIANT, LARGE
from state_machines import HEAD as TPU_HEAD
from state_machines import line, programs_of, ways_of
from state_programs import PROGRAMS, Program
from state_workloads import DEVICES, WORKLOADS, Tree, Workload

import jax_dist
from jax_dist import global_view
from jax_dist.testing import run_processes, simulated_devices

TIMES = 6
KINDS = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
Programs = tuple[Callable[..., Any], Any, tuple[Tree, ...]]  # a jitted step, its state, its batch


@dataclasses.dataclass(frozen=True)
class Row:
    """What one way of a workload costs, on one device."""

    way: str
    first: float  # the largest difference to pmap after one step, of the size of the leaf
    last: float  # and after TIMES
    arguments: int  # bytes
    temporaries: int  # bytes
    held: int  # bytes of live arrays between two steps, the batch left out
    sent: str
    flops: float
    seconds: float
    compiles: int

    def text(self, pmap: "Row", mapped: "Row") -> str:
        """One line of the table; memory is divided by pmap's, time by that of shard_map."""
        both = self.arguments + self.temporaries
        return (
            f"  {self.way:24} {self.first:7.0e} {self.last:7.0e} "
            f"{self.arguments:>11,} {self.arguments / pmap.arguments:6.3f} "
            f"{self.temporaries:>11,} {both / (pmap.arguments + pmap.temporaries):6.2f} "
            f"{self.held:>11,} {self.flops / 1e9:7.3f} {self.seconds * 1e3:7.0f} "
            f"{self.seconds / mapped.seconds:5.2f} {self.compiles:3}  {self.sent}"
        )


HEAD = (
    f"  {'':24} {'first':>7} {'last':>7} {'args B':>11} {'/pmap':>6} {'temp B':>11} {'both':>6} "
    f"{'held B':>11} {'GFLOP':>7} {'ms':>7} {'/smap':>5} {'jit':>3}  sent, bytes of the results"
)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--all", action="store_true", help="everything, and for two sizes of v5e")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--on", help="TPUs to compile for, with commas between")
    asked = parser.parse_args()
    simulated_devices(DEVICES)
    names = list(WORKLOADS) if asked.on is None else []
    if asked.only or asked.all:
        names = asked.only.split(",") if asked.only else [*WORKLOADS, *PROGRAMS]
    for name in names:
        if name in PROGRAMS:
            print(f"{name}, jax {jax.__version__}, one of {DEVICES} devices\n{COMPILED_HEAD}")
            for program in PROGRAMS[name]():
                print(compared(program), flush=True)
            continue
        if asked.processes == 1:
            rows = measured(name)
        else:
            outcomes = run_processes(
                measured,
                name,
                processes=asked.processes,
                cpu_devices=DEVICES // asked.processes,
                timeout=900,
            )
            errors = [outcome.error for outcome in outcomes if outcome.error is not None]
            if errors:
                raise ExceptionGroup(f"{name} with {asked.processes} processes", errors)
            rows = outcomes[0].value
        print(f"{name}, jax {jax.__version__}, processes: {asked.processes}\n{HEAD}")
        print("\n".join(row.text(*rows[:2]) for row in rows), flush=True)
    machines = asked.on or ("v5e:4x4,v5e:16x16" if asked.all else "")
    for machine in filter(None, machines.split(",")):
        print_on(machine)


def print_on(name: str) -> None:
    """Tables for TPUs: a transformer in each way, and one of 6.6 G parameters where it fits."""
    devices = list(jax_dist.topology(name).devices)
    for sizes in (LARGE, GIANT) if len(devices) >= 256 else (LARGE,):
        print(
            f"{sizes.layers} layers of {sizes.width} on {name}, jax {jax.__version__}\n{TPU_HEAD}"
        )
        for way in ways_of(devices, round(len(devices) ** 0.5)):
            if sizes is LARGE or way.name in ("hsdp", "tensor"):
                rows = 8 if sizes is GIANT and way.name == "tensor" else None
                for program, lowered in programs_of(way, sizes, rows):
                    print(line(way.name, program, lowered), flush=True)


def measured(name: str) -> list[Row]:
    """A row for each way; the first is pmap."""
    workload = WORKLOADS[name]()
    mesh = Mesh(np.array(jax.devices()), ("i",))
    wanted: list[Reference] = []
    return [_row(way, make, wanted) for way, make in ways(workload, mesh).items()]


# ---- what is only compiled


COMPILED_HEAD = (
    f"  {'':36} {'args B':>11} {'temp B':>11} {'both':>6} {'FLOPs':>6}  sent, bytes of the results"
)


def compared(program: Program) -> str:
    """One line of the table; both kinds of memory, and the FLOPs, are divided by pmap's."""
    devices = jax.devices()[: program.count]
    mapped = jax.pmap(program.step, "i", devices=devices, donate_argnums=0)
    stack = lambda leaf: jax.ShapeDtypeStruct((program.count, *leaf.shape), leaf.dtype)
    under_pmap = mapped.lower(jax.tree.map(stack, program.state), *program.batch).compile()
    view = global_view(program.step, "i", donate_argnums=0, **program.options)
    here = view.lower(program.state, *program.batch).compile()
    (args, temps, flops), theirs = _analysed(here), _analysed(under_pmap)
    both, share = (args + temps) / sum(theirs[:2]), flops / theirs[2]
    text = f"  {program.name:36} {args:>11,} {temps:>11,} {both:6.2f} {share:6.2f}"
    return f"{text}  {sent(here.as_text())}"


def _analysed(compiled: Any) -> tuple[int, int, float]:
    memory = compiled.memory_analysis()
    flops = (compiled.cost_analysis() or {}).get("flops", 0.0)
    return memory.argument_size_in_bytes, memory.temp_size_in_bytes, flops


# ---- the ways


def ways(workload: Workload, mesh: Mesh) -> dict[str, Callable[[], Programs]]:
    cut, whole = NamedSharding(mesh, P("i")), NamedSharding(mesh, P())
    here = [n for n, device in enumerate(jax.devices()) if device in jax.local_devices()]
    local = lambda tree: jax.tree.map(lambda leaf: leaf[here[0] : here[-1] + 1], tree)
    place = lambda leaf: jax.make_array_from_process_local_data(cut, leaf)

    def batch() -> tuple[Tree, ...]:
        return jax.tree.map(place, local(workload.batch))

    def pmapped() -> Programs:
        program = jax.pmap(workload.step, "i", donate_argnums=0)
        stacked = jax.tree.map(lambda leaf: np.stack([leaf] * len(here)), workload.state)
        own = local(workload.batch)
        if jax.process_count() == 1:
            stacked, own = jax.device_put((stacked, own), cut)
        return program, stacked, own

    def mapped() -> Programs:
        # What varies, and what does not, in one form: one slice for each device.
        def body(state: Tree, *own: Tree) -> Tree:
            state, own = jax.tree.map(lambda leaf: leaf[0], (state, own))
            return jax.tree.map(lambda leaf: leaf[None], workload.step(state, *own))

        specs = {"in_specs": P("i"), "out_specs": P("i")}
        program = jax.shard_map(body, mesh=mesh, check_vma=False, **specs)
        stacked = jax.tree.map(lambda leaf: np.stack([leaf] * len(here)), workload.state)
        return jax.jit(program, donate_argnums=0), jax.tree.map(place, stacked), batch()

    def viewed(**options: Any) -> Callable[[], Programs]:
        def make() -> Programs:
            view = global_view(
                workload.step,
                "i",
                mesh=mesh,
                out_axes=workload.out_axes,
                donate_argnums=0,
                **options,
            )
            own = batch()
            return view, view.place(workload.state, *own, stacked=False), own

        return make

    def by_hand() -> Programs:
        spec_of = lambda leaf: _longest(np.shape(leaf))
        of_params = jax.tree.map(spec_of, workload.state["params"])
        spec = jax.tree.map(spec_of, workload.state)
        shardings = jax.tree.map(lambda one: NamedSharding(mesh, one), spec)

        def per_device(state: Tree, *own: Tree) -> tuple[Tree, Tree]:
            assert workload.gradient is not None
            own = jax.tree.map(lambda leaf: leaf[0], own)
            gradients, rest = workload.gradient(state, *own)
            mean = jax.tree.map(_scattered_mean, gradients, of_params)
            return mean, lax.pmean(rest, "i")

        def step(state: Tree, *batch: Tree) -> tuple[Tree, Tree]:
            assert workload.update is not None
            used = {name: part for name, part in state.items() if name not in _OF_OPTIMIZERS}
            gradients, rest = jax.shard_map(
                per_device,
                mesh=mesh,
                in_specs=(P(), *[P("i")] * len(batch)),
                out_specs=(of_params, P()),
                check_vma=False,
            )(used, *batch)
            return workload.update(state, gradients, rest)

        jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole))
        state = jax.tree.map(_placed, workload.state, shardings)
        return jitted, state, batch()

    found: dict[str, Callable[[], Programs]] = {
        "pmap": pmapped,
        "shard_map": mapped,
        "global view": viewed(),
        "global view, reduce": viewed(shardings="fsdp", gradients="reduce"),
        "global view, fsdp": viewed(shardings="fsdp"),
        "global view, regather": viewed(shardings="fsdp", regather=True),
    }
    return found | ({"fsdp by hand": by_hand} if workload.gradient is not None else {})


_OF_OPTIMIZERS = ("moment", "mean", "square", "turn")


def _longest(shape: tuple[int, ...]) -> P:
    """As "fsdp" cuts."""
    fitting = [dim for dim, length in enumerate(shape) if length % DEVICES == 0]
    if not fitting or np.prod(shape) < 1024:
        return P()
    return P(*[None] * max(fitting, key=lambda dim: shape[dim]), "i")


def _scattered_mean(gradient: jax.Array, spec: P) -> jax.Array:
    if not len(spec):
        return lax.pmean(gradient, "i")
    return lax.psum_scatter(gradient, "i", scatter_dimension=len(spec) - 1, tiled=True) / DEVICES


def _placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


# ---- what is measured


@dataclasses.dataclass(frozen=True)
class Reference:
    """What pmap has on each device of this process, leaf by leaf, `[*s]`."""

    leaves: tuple[dict[Any, np.ndarray], ...]


def _row(way: str, make: Callable[[], Programs], wanted: list[Reference]) -> Row:
    """`wanted` is what pmap has after one step, and after the last; its own row fills it."""
    gc.collect()
    before = _held()
    program, state, batch = make()
    compiled = _Compiles()
    fastest = float("inf")
    first = last = 0.0
    for turn in range(TIMES):
        with compiled:
            start = time.process_time()
            state, rest = jax.block_until_ready(program(state, *batch))
            seconds = time.process_time() - start
        fastest = min(fastest, seconds) if turn else fastest
        if turn == 0:
            first = _difference(way, state, wanted, 0)
    last = _difference(way, state, wanted, 1)
    del rest
    gc.collect()
    held = _held() - before - _bytes_of(batch)
    analysed = program.lower(state, *batch).compile()
    memory: Any = analysed.memory_analysis()
    cost = analysed.cost_analysis() or {}
    return Row(
        way,
        first,
        last,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        held,
        sent(analysed.as_text()),
        cost.get("flops", 0.0),
        fastest,
        compiled.count,
    )


def sent(text: str) -> str:
    """How often each kind of collective stands in a program, and the bytes of its results."""
    found = []
    for kind, short in KINDS.items():
        types = re.findall(rf"= (.*?) {kind}(?:-start)?\(", text)
        shapes = [each for part in types for each in re.findall(r"(\w+)\[([\d,]*)\]", part)]
        total = sum(
            BYTES.get(dtype, 0) * int(np.prod([int(n) for n in dims.split(",") if n]))
            for dtype, dims in shapes
        )
        if types:
            found.append(f"{short} {len(types)}: {total:,}")
    return ", ".join(found)


class _Compiles:
    """Counts what the backend compiles while it is entered."""

    def __init__(self) -> None:
        self.count, self._on = 0, False
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **more: Any) -> None:
        del seconds, more
        self.count += self._on and event == "/jax/core/compile/backend_compile_duration"

    def __enter__(self) -> "_Compiles":
        self._on = True
        return self

    def __exit__(self, *error: object) -> None:
        self._on = False


def _held() -> int:
    """The bytes of all live arrays on the first device of this process."""
    return _bytes_of(jax.live_arrays())


def _bytes_of(tree: Tree) -> int:
    first = jax.local_devices()[0]
    # By their buffers: what was looked at shard by shard is listed twice.
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not leaf.is_deleted()
        for shard in leaf.addressable_shards
        if shard.device == first
    }
    return sum(buffers.values())


def _difference(way: str, state: Tree, wanted: list[Reference], number: int) -> float:
    """To what pmap had then; of pmap itself it is noted."""
    if way == "pmap":
        wanted.append(_own_slices(state))
    return _apart(state, wanted[number])


def _own_slices(stacked: Tree) -> Reference:
    leaves = []
    for leaf in jax.tree.leaves(stacked):
        shards = leaf.addressable_shards
        leaves.append({shard.device: np.array(shard.data[0]) for shard in shards})
    return Reference(tuple(leaves))


def _apart(state: Tree, wanted: Reference) -> float:
    """The largest difference, of the largest number of its leaf on that device."""
    largest = 0.0
    for leaf, one in zip(jax.tree.leaves(state), wanted.leaves, strict=True):
        for shard in leaf.addressable_shards:
            other, data = one[shard.device], np.asarray(shard.data)
            data = data[0] if leaf.ndim > other.ndim else data
            part = other if leaf.ndim > other.ndim else other[shard.index]
            if data.tobytes() == part.tobytes():
                continue
            size = max(float(np.abs(part).max(initial=0)), 1e-30)
            largest = max(largest, float(np.abs(data - part).max(initial=0)) / size)
    return largest


if __name__ == "__main__":
    main()
