"""Which values carry the device axis, as one run of the program has shown it.

Before the run, each expression of a file is watched: `__jd_see__(7, state)` hands its value on and
notes its arrays (`verify.recording.flow`). After it, every array that a mapped function took or
gave is known wherever an expression held it: in a field, in a list, in another function. Slots
that share arrays are one `Component`: they keep or lose the axis together.
"""

import ast
import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_dist.lint.model import pmaps
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.verify import slices
from jax_dist.migrate.verify.equivalence import NotProvedError
from jax_dist.migrate.verify.evidence import Array, RunRecord, SiteRecord
from jax_dist.migrate.watched_text import watched_code, watched_nodes


class Slot(NamedTuple):
    """What a mapped function takes or gives."""

    site: int  # the number of the place that maps it
    side: str  # "in", "out"; "word" for an argument that is given by name
    path: tuple[Any, ...]  # (position,); or through tuples of results


class WatchedFiles:
    """Files that a run is to watch.

    Args:
      modules: of the files, as they are before the migration.
    """

    def __init__(self, modules: Sequence[Module]):
        self._first: dict[str, int] = {}  # by path: the number of the first expression
        self._code: dict[str, bytes] = {}
        self.texts: dict[Path, bytes] = {}
        number = 0
        for module in modules:
            path = module.source.path
            self._first[path], self._code[path] = number, module.source.code
            self.texts[Path(path)] = module.source.written(watched_code(module, number))
            number += len(watched_nodes(module))

    def flow(self, record: RunRecord, devices: int) -> "RecordedFlow":
        """What a run of these texts on so many devices has shown."""
        return RecordedFlow(self._first, self._code, record, devices)


@dataclasses.dataclass(frozen=True)
class RecordedFlow:
    """The flow of one run."""

    first: Mapping[str, int]
    code: Mapping[str, bytes]
    record: RunRecord
    devices: int

    def of(self, module: Module) -> "FileFlow | None":
        """That of a file; None where it is not what ran, or not all was written down of it."""
        path = module.source.path
        if self.code.get(path) != module.source.code or len(self.record.flows) != 1:
            return None
        if not self.record.is_complete or any(site.process for site in self.record.sites):
            return None  # another process, such as a fork, has a part of it
        return FileFlow(module, self)

    @functools.cached_property
    def arrays(self) -> dict[int, dict[int, str]]:
        """By expression: its arrays, and where in the value they were; "" for all of it."""
        return {
            int(number): {int(serial): where for serial, where in seen["arrays"].items()}
            for number, seen in self.record.flows[0]["expressions"].items()
            if seen["arrays"]
        }

    @functools.cached_property
    def slots(self) -> dict[int, list[Slot]]:
        """By array: what it was, of all files."""
        return {
            int(serial): [Slot(site, side, tuple(path)) for site, side, *path in slots]
            for serial, slots in self.record.flows[0]["slots"].items()
        }


@dataclasses.dataclass(eq=False)
class Component:
    """Slots that share arrays."""

    slots: set[Slot] = dataclasses.field(default_factory=set)
    serials: set[int] = dataclasses.field(default_factory=set)

    @property
    def sites(self) -> set[int]:
        """The places whose mapped functions take or give them."""
        return {slot.site for slot in self.slots}


class FileFlow:
    """The flow as one file shows it.

    Args:
      module: the file.
      run: which watched it, in one process.
    """

    def __init__(self, module: Module, run: RecordedFlow):
        self.module: Module = module
        self.nodes: list[ast.expr] = watched_nodes(module)
        self._flow, self._seen, self._slots = run.record.flows[0], run.arrays, run.slots
        self._record, self._devices = run.record, run.devices
        self._first = first = run.first[module.source.path]
        self._numbers: dict[ast.AST, int] = {n: first + i for i, n in enumerate(self.nodes)}

    # --- expressions

    def serials(self, node: ast.AST) -> set[int]:
        """The arrays of mapped functions that an expression held."""
        return {*self._seen.get(self._numbers.get(node, -1), ())}

    def held_in(self, node: ast.AST) -> set[int]:
        """Those that an expression, or a part of it, held."""
        return {serial for each in ast.walk(node) for serial in self.serials(each)}

    def bound_by(self, value: ast.expr) -> set[int]:
        """Those that a name gets which is bound to an expression; of a display, all inside."""
        return self.serials(value) if self.watches(value) else self.held_in(value)

    def is_array(self, node: ast.AST) -> bool:
        """Whether it always was one of these arrays, and no tree of them."""
        where = self._where(node)
        return bool(where) and not any(where)

    def is_mapping(self, node: ast.AST) -> bool:
        """Whether it was a dictionary, whose entries have names."""
        return any(where.startswith("['") for where in self._where(node))

    def _where(self, node: ast.AST) -> list[str]:
        return [*self._seen.get(self._numbers.get(node, -1), {}).values()]

    def has_others(self, node: ast.AST) -> bool:
        """Whether it held other arrays too."""
        return self._told(node).get("others", False)

    def has_unmapped(self, node: ast.AST) -> bool:
        """Whether it held any array that no mapped function took or gave, of any rank."""
        return self.has_others(node) or self._told(node).get("scalars", False)

    def has_numbers(self, node: ast.AST) -> bool:
        """Whether it held numbers of Python in a tree; of what is not watched, it may."""
        return self._has("numbers", node)

    def has_numpy(self, node: ast.AST) -> bool:
        """Whether it held arrays of numpy; of what is not watched, it may."""
        return self._has("numpy", node)

    def _has(self, what: str, node: ast.AST) -> bool:
        if isinstance(node, ast.Dict | ast.Tuple | ast.List):
            parts = node.values if isinstance(node, ast.Dict) else node.elts
            return any(self._has(what, each) for each in parts)
        return self._told(node).get(what, True)

    def has_arrays(self, node: ast.AST) -> bool:
        """Whether it held any, of mapped functions or not."""
        return self.has_others(node) or bool(self.serials(node))

    def is_on_host(self, node: ast.AST) -> bool:
        """Whether all arrays that it held were of numpy."""
        return self._told(node).get("host", False)

    def is_callable(self, node: ast.AST) -> bool:
        """Whether it was a function or the like; what never ran may be."""
        return self._told(node).get("callable", True)

    def watches(self, node: Any) -> bool:
        """Whether an expression is one of those that told their values."""
        return node in self._numbers

    def ran(self, node: ast.AST) -> bool:
        return bool(self._told(node).get("hits"))

    def called_sites(self, node: ast.AST) -> set[int]:
        """The mapped functions whose results it is the first to hold."""
        return {*self._told(node).get("sites", ())}

    def _told(self, node: ast.AST) -> Mapping[str, Any]:
        number = self._numbers.get(node)
        return self._flow["expressions"].get(str(number), {})

    def holders(self, serials: set[int]) -> Iterator[ast.expr]:
        """The expressions of the file that held some of these arrays."""
        for node in self.nodes:
            if not serials.isdisjoint(self.serials(node)):
                yield node

    def is_held_elsewhere(self, serials: set[int]) -> bool:
        """Whether an expression of another file held one of them."""
        own = range(self._first, self._first + len(self.nodes))
        return any(
            number not in own and not serials.isdisjoint(seen)
            for number, seen in self._seen.items()
        )

    def born_at(self, node: ast.AST) -> set[int]:
        """The arrays that an expression was the first to hold."""
        number = self._numbers.get(node)
        born = self._flow["born"]
        return {each for each in self.serials(node) if born.get(str(each)) == number}

    def makers(self, serials: set[int]) -> dict[ast.expr | None, set[int]]:
        """The expressions that first held arrays, and these; None: another file, or none."""
        found: dict[ast.expr | None, set[int]] = collections.defaultdict(set)
        for serial in sorted(serials):
            number = self._flow["born"].get(str(serial))
            if number is not None:
                own = 0 <= number - self._first < len(self.nodes)
                found[self.nodes[number - self._first] if own else None].add(serial)
            elif not any(slot.side == "out" for slot in self._slots[serial]):
                found[None].add(serial)
        return found

    def results(self, site: SiteRecord) -> set[int]:
        """The arrays that a mapped function gave."""
        is_own = lambda slot: (slot.site, slot.side) == (site.number, "out")
        return {serial for serial, slots in self._slots.items() if any(map(is_own, slots))}

    def takers(self, serials: set[int]) -> set[int]:
        """The mapped functions that took one of these arrays."""
        slots = (slot for serial in serials for slot in self._slots[serial])
        return {slot.site for slot in slots if slot.side != "out"}

    def type_of(self, node: ast.AST) -> str:
        """The name of the type that it was of; "" where it never ran."""
        return self._told(node).get("type", "")

    # --- mapped functions

    @functools.cached_property
    def sites(self) -> dict[Site, SiteRecord]:
        """The places of the file that map, and what was called there; one place, one record."""
        found: dict[Site, SiteRecord] = {}
        taken: collections.Counter[int] = collections.Counter()
        for site in pmaps.applications(self.module):
            lines = {site.reference.lineno, site.node.lineno}
            own = [each for each in self._of_file if each.line in lines]
            taken.update(each.number for each in own)
            if len(own) == 1:
                found[site] = own[0]
        return {site: each for site, each in found.items() if taken[each.number] == 1}

    @functools.cached_property
    def _of_file(self) -> list[SiteRecord]:
        path = str(Path(self.module.source.path).resolve())
        return [each for each in self._record.called if each.file == path]

    def is_mapped_once(self, site: Site) -> bool:
        """Whether no function was mapped a second time at a place."""
        found = self.sites.get(site)
        return found is not None and found.number not in self._flow["again"]

    def misfit(self, site: Site) -> str:
        """What its calls show that jit(shard_map) could not do; "" where nothing does."""
        found = self.sites.get(site)
        if found is None:
            return ""
        if self._fewest(found) < self._devices and self.slices(site) is None:
            return "a call has fewer slices than there are devices"
        return ""

    def slices(self, site: Site) -> int | None:
        """How many slices all its calls had, if fewer than devices, and the text has the number.

        Then that is so in other runs, on more devices.
        """
        found = self.sites.get(site)
        if found is None or (count := self._fewest(found)) == self._devices:
            return None
        is_same = all(a.devices == count for call in found.calls for a in call.returned)
        constants = (e.value for e in ast.walk(self.module.tree) if isinstance(e, ast.Constant))
        is_written = any(type(each) is int and each == count for each in constants)
        return count if is_same and is_written else None

    def _fewest(self, site: SiteRecord) -> int:
        """The slices of the call that had fewest."""
        arrays = (array.devices for call in site.calls for array in call.returned)
        return min(arrays, default=self._devices)

    def forms(self, site: SiteRecord) -> list[Mapping[str, Any]]:
        """How it was called, and what came back: `arguments` and `words`, or `results`."""
        return self._flow["forms"].get(str(site.number), [])

    def static(self, site: SiteRecord) -> dict[int, set[str]]:
        """By position of a static argument: the types of its values."""
        return {at: {*kinds} for number, at, kinds in self._flow["static"] if number == site.number}

    def given(self, site: SiteRecord, position: int) -> Iterator[Array]:
        """All arrays that were given there."""
        for call in site.calls:
            for array in call.given:
                if array.path.startswith(f"[{position}]"):
                    yield array

    def alike_results(
        self, site: SiteRecord, alike: set[int], results: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], bool]:
        """Which results are the same on all devices, as the programs of all calls show it.

        Args:
          site: the place.
          alike: the positions of arguments that are.
          results: the paths of the results.
        """
        found = dict.fromkeys(results, True)
        for text, paths in _programs(site):
            positions = (path.partition("]")[0].removeprefix("[") for path in text["paths"])
            given = [position.isdecimal() and int(position) in alike for position in positions]
            try:
                same = slices.alike_results(text["text"], given)
            except NotProvedError:
                same = []
            for result in results:
                prefix = "".join(f"[{each}]" for each in result)
                own = [i for i, path in enumerate(paths) if path.startswith(prefix)]
                found[result] &= len(same) == len(paths) and all(same[i] for i in own)
        return found

    # --- components

    @functools.cached_property
    def _in_variables(self) -> dict[Any, list[Slot]]:
        """By variable of a function, and place in its value: the slots that it has held."""
        found: dict[Any, list[Slot]] = collections.defaultdict(list)
        for node in self.nodes:
            name = variable(self.module, node)
            of_leaf = isinstance(self.module.function(node), ast.Lambda)
            if name is None or of_leaf:
                continue
            for serial, where in self._seen.get(self._numbers[node], {}).items():
                found[name, where] += self._slots[serial]
        return found

    @functools.cached_property
    def components(self) -> list[Component]:
        """Of all slots of the run, those of other files too."""
        up: dict[Slot, Slot] = {}

        def root(slot: Slot) -> Slot:
            while up.setdefault(slot, slot) != slot:
                slot = up[slot]
            return slot

        for slots in self._slots.values():
            for each in slots:
                up[root(each)] = root(slots[0])
        for slots in self._in_variables.values():  # the next round of a loop may carry it on
            for each in slots:
                up[root(each)] = root(slots[0])
        found: dict[Slot, Component] = collections.defaultdict(Component)
        for serial, slots in self._slots.items():
            part = found[root(slots[0])]
            part.slots.update(slots)
            part.serials.add(serial)
        return list(found.values())


def variable(module: Module, node: ast.expr) -> Any:
    """What tells a variable from others of its name; None where it is none."""
    if isinstance(node, ast.Attribute):
        return module.text(node)
    if not isinstance(node, ast.Name):
        return None
    found = module.scope(node).lookup(node.id)
    return (node.id, found[0]) if found else None


def _programs(site: SiteRecord) -> Iterator[tuple[Mapping[str, Any], list[str]]]:
    """The program of each call that returned, and the paths of what it returned.

    A call without a program has an empty one, of which nothing can be shown.
    """
    seen: list[Any] = []
    for call in site.calls:
        if call.raised is None and call.text not in seen:
            seen.append(call.text)
            text = call.text or {}
            paths = [each.path for each in call.returned]
            yield (text, paths) if "text" in text else ({"paths": [], "text": _NO_PROGRAM}, paths)


_NO_PROGRAM: Mapping[str, Any] = {"in": [], "consts": [], "eqns": [], "out": []}
