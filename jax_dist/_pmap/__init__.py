"""`jax_dist.pmap`: a function of one slice, mapped over devices by jit(shard_map).

`options` validates the options. `dispatch` gets the calls that C++ does not know yet: `call`
flattens their arguments, `meshes` chooses the devices, `placement` puts the arguments there, and
`traced_body` traces the user's function into its shard_map. `process_calls` converts between
process-local and global arrays. A cached call never inspects its arguments in Python.
"""
