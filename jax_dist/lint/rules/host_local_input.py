"""JXD206: mapped functions whose input depends on the process."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import flow
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, Page, rule

_PAGE = Page(
    code="JXD206",
    name="host-local-input",
    summary="`process_index()` in data for a mapped function",
    cost="a port to `jit(shard_map)` takes a part for the whole",
    what="Finds `jax.process_index()` and `jax.process_count()` if the file shows that their "
    "results reach an argument of a mapped function.",
    why="pmap takes each process's own part of the data and joins the parts by itself. A "
    "`jit(shard_map)` takes one global array instead: it refuses a part, or computes as if "
    "the part were the whole.",
    example="mine = data[jax.process_index() :: jax.process_count()]\ny = jax.pmap(f)(mine)\n",
    instead="Keep pmap's view with `jax_dist.pmap`, or make global arrays with "
    "`jax.make_array_from_process_local_data`.",
    fix="None: `jax-dist migrate --to jax` refuses such functions and says why; `--to jax_dist` "
    "keeps the view of one process.",
    since="Any jax with several processes.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html",
    default=False,
)

_PROCESS = ("jax.process_index", "jax.process_count", "jax.host_id", "jax.host_count")
_DEPTH = 6  # names that are followed back from an argument


@rule(_PAGE, triggers=(b"process_index", b"process_count", b"host_id", b"host_count"))
def _host_local_input(module: Module) -> Iterator[Found]:
    uses = module.uses(*_PROCESS)
    if not uses:
        return
    feeding: set[ast.AST] = set()
    for call in flow.of(module).mapped_calls:
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            _gather(module, argument, feeding, _DEPTH)
    for node in uses:
        if node in feeding:
            yield Found(node, "a mapped function may get only this process's part of the data")


def _gather(module: Module, node: ast.expr, gathered: set[ast.AST], depth: int) -> None:
    """All nodes that an argument is made of, names followed back."""
    for each in ast.walk(node):
        if each in gathered:
            continue
        gathered.add(each)
        if depth and isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            for value in module.values(each) or ():
                _gather(module, value, gathered, depth - 1)
