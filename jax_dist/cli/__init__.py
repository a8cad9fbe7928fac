"""The program `jax-dist`: one module for each subcommand, with its help, options and output.

Only the module of the subcommand is loaded, which imports what does the work when it runs: no help
waits for jax or for the rules, and `lint` and `migrate` never import jax. `MisuseError` is the
user's; any other error is a fault of jax-dist, with a traceback.
"""
