"""What shows that a program runs in several processes: its own calls, and how it is started.

A program is a file that imports others, and all that it reaches. A comparison, as around a print in
the first process, shows nothing, nor does another program of the project, nor a word. That nothing
is found proves little, for what starts the processes may lie elsewhere.
"""

import ast
import functools
import os
import re
from collections.abc import Iterable, Iterator

from jax_dist.lint.model import sources
from jax_dist.lint.model.import_graph import ImportGraph

_JOIN = frozenset(
    ("process_allgather", "broadcast_one_to_all", "sync_global_devices")
    + ("make_array_from_process_local_data", "host_local_array_to_global_array")
    + ("global_array_to_host_local_array",)
)
_NUMBERS = frozenset(("process_index", "process_count", "host_id", "host_count"))
_SAYS = re.compile(rb"distributed|mpi4py|" + b"|".join(e.encode() for e in _JOIN | _NUMBERS))
_LOGGERS = re.compile(r"(?i)(^|\.)(print|log(ging|ger)?|debug|info|warn(ing)?|error)($|\.)")

_LAUNCHERS = re.compile(
    rb"--worker=all|\b(?:srun|xpk|torchrun|mpirun|mpiexec)\b|(?:JAX_COORDINATOR|JAX_NUM_PROCESSES"
    rb"|TPU_WORKER_ID|OMPI_|PMI_)\w*="
)
_BATCH = re.compile(rb"#SBATCH[^\n]*--n(?:odes|tasks)")
_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml", ".toml", ".md", ".rst")
_SETTINGS = (".json", ".ini", ".cfg")
_PYTHON = (".py", ".ipynb")
_NAMES = ("Dockerfile", "README", "Makefile")
_LARGEST = 2**20  # bytes of a file that is no code
_LARGEST_SETTINGS = 2**16  # larger ones are data
_LARGEST_OTHER = 2**14


class ProcessSigns:
    """Those of some projects.

    Args:
      graph: their files and imports.
    """

    def __init__(self, graph: ImportGraph):
        self._graph = graph
        self.of: functools._lru_cache_wrapper[str] = functools.cache(self._of)

    def _of(self, path: str) -> str:
        """The first sign of a program that a file is part of, code before scripts; or "".

        Args:
          path: of the file, absolute.
        """
        for other, sign in self._in_code:
            if other == path or any({path, other} <= each for each in self._programs.values()):
                return sign
        for text, place in self._commands:
            for entry, reached in self._programs.items():
                stem = re.escape(os.path.basename(entry).removesuffix(".py").encode())
                if path in reached and re.search(rb"(?<![\w-])" + stem + rb"(\.py\b|\s|$)", text):
                    word = _LAUNCHERS.search(text) or _BATCH.search(text)
                    return f"{word[0].decode() if word else ''} in {place}"
        return ""

    @functools.cached_property
    def _programs(self) -> dict[str, frozenset[str]]:
        """By file: itself and what it reaches."""
        return {path: self._graph.reached(path) | {path} for path in self._graph.files}

    @functools.cached_property
    def _in_code(self) -> list[tuple[str, str]]:
        return [
            (path, f"{word} in {os.path.relpath(path)}:{line}")
            for path, data in self._graph.files.items()
            for word, line in _signs(path, data)
        ]

    @functools.cached_property
    def _commands(self) -> list[tuple[bytes, str]]:
        return [*_commands(self._graph.roots)]


def _signs(path: str, data: bytes) -> Iterator[tuple[str, int]]:
    """The calls of a file that matter, and their lines."""
    if not _SAYS.search(data) or not path.endswith(".py"):
        return
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    loads = [e for e in ast.walk(tree) if isinstance(e, ast.Name) and isinstance(e.ctx, ast.Load)]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(e.name.split(".")[0] == "mpi4py" for e in names):
                yield "mpi4py", node.lineno
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "mpi4py":
                yield "mpi4py", node.lineno
            case ast.Call(func=function):
                name = ast.unparse(function)
                last = name.rpartition(".")[2]
                values = _values(node, parents, loads) if last in _NUMBERS else ()
                joins = last in _JOIN or name.endswith("distributed.initialize")
                if joins or any(_is_used(each, parents) for each in values):
                    yield name, node.lineno


def _values(
    call: ast.Call, parents: dict[ast.AST, ast.AST], loads: Iterable[ast.Name]
) -> list[ast.expr]:
    """Where the value of a call is read: there, or by the name that it gets."""
    match parents.get(call):
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [each for each in loads if each.id == name]
    return [call]


def _is_used(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether more is done with a number than to compare or to print it."""
    while isinstance(node, ast.expr | ast.keyword | ast.FormattedValue):
        around = parents[node]
        match around:
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return False
            case ast.Call(func=function) if _LOGGERS.search(ast.unparse(function)):
                return False
            case ast.If(test=test) | ast.IfExp(test=test) if test is node:
                return False
        node = around
    return not isinstance(node, ast.Expr)


def _commands(roots: Iterable[str]) -> Iterator[tuple[bytes, str]]:
    """Lines that start a program in several processes, and files that do so as a whole."""
    for path, data in project_texts(roots):
        where = os.path.relpath(path)
        if (batch := _BATCH.search(data)) is not None:
            yield data, f"{where}:{_line(data, batch)}"
        for found in re.finditer(rb"(?:[^\n]*\\\n)*[^\n]+", data):
            if _LAUNCHERS.search(found[0]):
                yield found[0], f"{where}:{_line(data, found)}"


def _line(data: bytes, found: re.Match[bytes]) -> int:
    return data.count(b"\n", 0, found.start()) + 1


def project_texts(
    roots: Iterable[str], *, deep: bool = True, every: bool = False
) -> Iterator[tuple[str, bytes]]:
    """The files in some folders that may start a program, as far as they can be read.

    Args:
      roots: the folders.
      deep: also what is in the folders below.
      every: also those whose names do not say so, but for Python and what is large.
    """
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - set(sources.EXCLUDED)) if deep else []
            for name in sorted(names):
                path, most = os.path.join(folder, name), _largest(name, every=every)
                try:
                    if most and os.path.isfile(path) and os.path.getsize(path) <= most:
                        with open(path, "rb") as file:
                            yield path, file.read()
                except OSError:
                    continue


def _largest(name: str, *, every: bool) -> int:
    """Up to how many bytes a file of that name is read."""
    if name.endswith(_SUFFIXES) or name.startswith(_NAMES) or "." not in name:
        return _LARGEST
    if name.endswith(_SETTINGS):
        return _LARGEST_SETTINGS
    return _LARGEST_OTHER if every and not name.endswith(_PYTHON) else 0
