"""Guards around a training loop: no hidden transfer, compilation, lost donation or growing memory.

What comes in are the calls of jit objects in a block, as `_compat` sees them before and after, and
the errors of JAX's own transfer guard. What goes out is an error that says where, which argument,
and what to do, in the user's names: from `transfers`, `compilations`, `donation` and `memory`.
`strict` is what users call, `blocks` turns it on and off in each thread; `descriptions` finds the
names.

In the steady state a guard may cost nothing, it may keep no array alive, and it leaves the settings
of JAX as they were.
"""
