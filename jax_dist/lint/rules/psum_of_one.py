"""JXD306: `psum(1, axis)` is `axis_size(axis)`."""

import re

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety

# Not of another first argument, nor in a sentence.
_OF_ONE = re.compile(rb"psum(?!\w|\s*\(\s*[^\s1(#\\]| (?!as |if |else )[a-z])")


@Rule(
    "JXD306",
    what="`jax.lax.psum(1, axis)`, under any alias.",
    why="It reads as communication, but JAX folds it to a constant while tracing.",
    instead="n = jax.lax.axis_size('i')",
    triggers=lambda words: words.hold(b"psum") and bool(_OF_ONE.search(words.data)),
    since=(0, 6, 1),
)
def psum_of_one(module: Module) -> Findings:
    for call in module.calls("jax.lax.psum"):
        named = [word.value for word in call.keywords if word.arg == "axis_name"]
        arguments = [*call.args, *named]
        if not call.args or len(arguments) != 2 or len(named) != len(call.keywords):
            continue
        one, axis = arguments
        # By text: the values True and 1.0 equal 1, yet psum gives them other types.
        if module.text(one) == "1":
            name, imports = module.name_for("jax.lax.axis_size", call)
            up_to_axis = Edit(module.span(one)[0], module.span(axis)[0], "")  # `1, axis_name=`
            edits = (Edit(*module.span(call.func), name), up_to_axis)
            fix = Fix("use jax.lax.axis_size", Safety.SAFE, edits, imports)
            yield Found(call, "psum(1, axis) is axis_size(axis)", fix)
