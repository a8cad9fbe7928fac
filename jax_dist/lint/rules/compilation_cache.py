"""JXD402, JXD405, JXD406: what the compilation cache on disk never keeps, or never finds again."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import pmaps, scopes, traced
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, Page, rule

_PARTITIONING = Page(
    code="JXD402",
    name="custom-partitioning-outside-shard-map",
    summary="a `custom_partitioning` operation outside `shard_map`",
    cost="the cache misses in every run",
    what="Finds calls of a function made by `custom_partitioning`, inside a function that the file "
    "passes to jit and not to shard_map.",
    why="The program contains the address of a Python object, so its key in the persistent cache "
    "differs in each process and nothing is reused: one new entry in each run, and none if "
    "the call is inside a shard_map (jax 0.10.2).",
    example="@jax.experimental.custom_partitioning.custom_partitioning\n"
    "def norm(x):\n    return x / x.sum()\n\n\nstep = jax.jit(lambda x: norm(x) + 1)\n",
    instead="step = jax.jit(jax.shard_map(lambda x: norm(x) + 1, mesh=mesh, in_specs=P('i'), "
    "out_specs=P('i')))\n",
    fix="None: only the `partition` callback knows the specs. `jax_dist.rewrite` inserts a "
    "shard_map with the specs that the compiler would choose.",
    since="Any jax with custom_partitioning.",
    source="https://docs.jax.dev/en/latest/persistent_compilation_cache.html; measured.",
)

_MAKERS = (
    "jax.experimental.custom_partitioning.custom_partitioning",
    "jax.experimental.custom_partitioning",
)


@rule(_PARTITIONING, triggers=(b"*custom_partitioning*",))
def _custom_partitioning_outside_shard_map(module: Module) -> Iterator[Found]:
    for made in traced.applications(module, *_MAKERS):
        if isinstance(made.fun, scopes.Function) and not isinstance(made.fun, ast.Lambda):
            reads = module.reads(module.scope(made.fun), made.fun.name)
        else:
            reads = pmaps.reads_of(module, made.node)
        for call in filter(None, map(module.call_of, reads)):
            under = {
                each.by
                for each in traced.traced(module)
                if traced.is_inside(module, call, each.function)
            }
            if under == {"jit"}:
                message = "custom_partitioning under jit makes a new cache key in each process"
                yield Found(call, message)


_CALLBACK = Page(
    code="JXD405",
    name="callback-not-cached",
    summary="a callback or a `jax.debug.print`",
    cost="through jax 0.10.2 the program is never cached",
    what="Finds `jax.pure_callback`, `jax.experimental.io_callback`, `jax.debug.callback` and "
    "`jax.debug.print`.",
    why="Through jax 0.10.2 a program with a callback is never written to the persistent cache, "
    "so every process compiles it again (0 entries on jax 0.10.2, 1 on 0.12.0.1).",
    example="@jax.jit\ndef step(x):\n    jax.debug.print('x {}', x)\n    return x + 1\n",
    instead="@jax.jit\ndef step(x):\n    return x + 1  # print the result outside\n",
    fix="None: the text does not show whether the callback is needed.",
    since="Up to jax 0.10.2; jax 0.11.0 keeps such programs.",
    source="https://github.com/jax-ml/jax/pull/38405; measured on jax 0.10.2 and 0.12.0.1.",
    default=False,
)

_CALLBACKS = (
    "jax.pure_callback",
    "jax.experimental.io_callback",
    "jax.debug.callback",
    "jax.debug.print",
)


@rule(_CALLBACK, triggers=(b"*_callback*", b"debug.print", b"debug.callback", b"import debug"))
def _callback_not_cached(module: Module) -> Iterator[Found]:
    for node in module.uses(*_CALLBACKS):
        name = (module.qualified_name(node) or "").rpartition(".")[2]
        yield Found(node, f"{name} keeps a program out of the persistent cache up to jax 0.10.2")


_CONFIG = Page(
    code="JXD406",
    name="cache-config",
    summary="a cache folder without a minimum compile time, or open to all",
    cost="small programs are not cached; others can run code as you",
    what="Finds code that sets the folder of the persistent compilation cache but leaves the "
    "minimum compile time at its default, and folders that anyone can write to.",
    why="By default only programs that took 1 second to compile are kept: 0 of 3 programs of a "
    "small training step were (jax 0.10.2). And JAX trusts the cache: it runs whatever others "
    "write into the folder.",
    example="jax.config.update('jax_compilation_cache_dir', '/tmp/jax_cache')\n",
    instead="jax.config.update('jax_compilation_cache_dir', os.path.expanduser('~/.cache/jax'))\n"
    "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n",
    fix="Unsafe: more programs are kept, so the folder grows.",
    since="jax 0.4.26: the setting for the minimum compile time.",
    source="https://docs.jax.dev/en/latest/persistent_compilation_cache.html; measured.",
)

_DIR = "jax_compilation_cache_dir"
_TIME = "jax_persistent_cache_min_compile_time_secs"
_TIMES = (_TIME.encode(), b"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
_SHARED = ("/tmp/", "/var/tmp/", "/dev/shm/")
_SETTERS = (
    "jax.experimental.compilation_cache.compilation_cache.set_cache_dir",
    "jax.experimental.compilation_cache.compilation_cache.initialize_cache",
)


@rule(_CONFIG, triggers=(b"jax_compilation_cache_dir", b"compilation_cache."))
def _cache_config(module: Module) -> Iterator[Found]:
    has_time = any(name in module.source.code for name in _TIMES)
    for call, folder in _settings(module):
        name = folder.value if isinstance(folder, ast.Constant) else ""
        if not has_time and name is not None:
            message = "programs that compile in less than 1 second are not kept"
            yield Found(call, message, _time_fix(module, call))
        if isinstance(name, str) and f"{name}/".startswith(_SHARED):
            yield Found(folder, "anyone who can write this folder can have their code run as yours")


def _settings(module: Module) -> Iterator[tuple[ast.Call, ast.expr]]:
    """`(call, folder)` of each place that sets the folder."""
    for call in module.calls("jax.config.update"):
        match call.args:
            case [ast.Constant(value=name), folder] if name == _DIR:
                yield call, folder
    for call in module.calls(*_SETTERS):
        if call.args:
            yield call, call.args[0]


def _time_fix(module: Module, call: ast.Call) -> Fix | None:
    """Another statement below; only where the call is a statement on its own line."""
    statement = module.statement(call)
    if not (isinstance(statement, ast.Expr) and statement.value is call):
        return None
    indent, after = module.margins(statement)
    if indent.strip() or not (after.strip() == "" or after.lstrip().startswith("#")):
        return None
    name, imports = module.name_for("jax.config.update", call)
    quote = "'" if "'" in module.text(call) else '"'
    text = f"{indent}{name}({quote}{_TIME}{quote}, 0)\n"
    line = module.offset(statement.lineno, 0)
    edit = Edit(line, line, text)
    return Fix("keep programs however fast they compile", Safety.UNSAFE, (edit,), imports)
