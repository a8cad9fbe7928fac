"""`jax_dist.pmap` and its relatives: functions of one slice, mapped over devices by jit(shard_map).

In come a function, the options of `pmap` and the arguments of each call; out go arrays on the mesh.
`pmap` checks the options. `dispatch` gets the calls that C++ does not know yet. `body` flattens
their arguments and traces the function for one slice, `meshes` lays its axes over devices, and
`placement` puts the arguments there. `emission` builds the program, with `region` for its shard_map
and `collectives` for several slices a device. `process_calls` joins the slices of processes.

Never does a known call look at its arguments in Python, and never is a program called before all
its arguments lie on the mesh: else there would be another program for each place they come from.
"""
