"""JXD406: a persistent cache that keeps nothing, or that others can write."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD406",
    name="cache-config",
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


@rule(PAGE, triggers=(b"jax_compilation_cache_dir", b"compilation_cache."))
def check(module: Module) -> Iterator[Found]:
    has_time = any(name in module.source.code for name in _TIMES)
    for call, folder in _settings(module):
        if not has_time and not _is_off(folder):
            message = "programs that compile in less than 1 second are not kept"
            yield Found(call, message, _fix(module, call))
        if _is_shared(folder):
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


def _is_off(folder: ast.expr) -> bool:
    return isinstance(folder, ast.Constant) and folder.value is None


def _is_shared(folder: ast.expr) -> bool:
    is_text = isinstance(folder, ast.Constant) and isinstance(folder.value, str)
    return is_text and f"{folder.value}/".startswith(_SHARED)  # type: ignore[attr-defined]


def _fix(module: Module, call: ast.Call) -> Fix | None:
    """Another statement below; only where the call is a statement on its own line."""
    statement = module.statement(call)
    if not (isinstance(statement, ast.Expr) and statement.value is call):
        return None
    start, end = module.span(statement)
    line_start = module.offset(statement.lineno, 0)
    indent = module.source.code[line_start:start].decode()
    after = module.source.line_text(end)[statement.end_col_offset or 0 :].lstrip()
    if indent.strip() or not (after == "" or after.startswith("#")):
        return None
    name, imports = module.name_for("jax.config.update", call)
    quote = "'" if "'" in module.text(call) else '"'
    text = f"{indent}{name}({quote}{_TIME}{quote}, 0)\n"
    edit = Edit(line_start, line_start, text)
    return Fix("keep programs however fast they compile", Safety.UNSAFE, (edit,), imports)
