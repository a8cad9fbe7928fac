"""JXD406: a compilation cache that keeps little, or that anyone can write."""

import ast

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety

_DIR = "jax_compilation_cache_dir"
_MIN_TIME = "jax_persistent_cache_min_compile_time_secs"
_ANYONE_CAN_WRITE = ("/tmp/", "/var/tmp/", "/dev/shm/")
_MODULE = "jax.experimental.compilation_cache.compilation_cache"


@Rule(
    "JXD406",
    what="Code that sets the folder of the persistent compilation cache but leaves the minimum "
    "compile time at its default, and folders that anyone can write to.",
    why="By default only programs that took 1 second to compile are kept: 0 of 3 programs of a "
    "small training step were (jax 0.10.2). And JAX runs whatever others write into the folder. "
    "The fix is unsafe: the folder grows.",
    instead="jax.config.update('jax_compilation_cache_dir', os.path.expanduser('~/.cache/jax'))\n"
    "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)",
    triggers=(_DIR.encode(), b"compilation_cache"),
)
def cache_config(module: Module) -> Findings:
    variable = _MIN_TIME.upper()  # of the environment
    has_min_time = any(name.encode() in module.source.code for name in (_MIN_TIME, variable))
    calls = module.calls(f"{_MODULE}.set_cache_dir", f"{_MODULE}.initialize_cache")
    settings = [(call, call.args[0]) for call in calls if call.args]
    for call in module.calls("jax.config.update"):
        if len(call.args) == 2 and getattr(call.args[0], "value", None) == _DIR:
            settings.append((call, call.args[1]))
    for call, folder in settings:
        name = folder.value if isinstance(folder, ast.Constant) else ""
        if not has_min_time and name is not None:  # None switches the cache off
            message = "programs that compile in less than 1 second are not kept"
            yield Found(call, message, _time_fix(module, call))
        if isinstance(name, str) and f"{name}/".startswith(_ANYONE_CAN_WRITE):
            yield Found(folder, "anyone who can write this folder can have their code run as yours")


def _time_fix(module: Module, call: ast.Call) -> Fix | None:
    """Return the fix that sets the least compile time to 0, in a line above a call."""
    text_before, _ = module.margins(call)
    if not isinstance(module.parent(call), ast.Expr) or text_before.strip():
        return None  # the call is part of a statement, or shares its line with another
    name, imports = module.name_for("jax.config.update", call)
    quote = "'" if "'" in module.text(call) else '"'
    start = module.offset(call.lineno, 0)
    edit = Edit(start, start, f"{text_before}{name}({quote}{_MIN_TIME}{quote}, 0)\n")
    return Fix("keep programs however fast they compile", Safety.UNSAFE, (edit,), imports)
