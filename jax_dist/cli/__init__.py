"""The program `jax-dist`: one module for each subcommand, with its help, options and output.

In come the words of a command line; out go text and an exit code (`terminal.Exit`). Only the module
of the subcommand that runs is loaded, and it imports what does the work when it runs: no help waits
for jax or for the rules, and `lint` and `migrate` never import jax. Only `MisuseError` is the
user's; any other error is a fault of jax-dist, with a traceback, and never has the exit code of a
finding.
"""
