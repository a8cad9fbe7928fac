"""The program `jax-dist`: one module for each subcommand, with its help, options and output.

In come the words of a command line; out go text and an exit code (`terminal.Exit`). `cli` loads
only the subcommand that is asked for, whose module has `add_parser`. The work of a long one is in
the module with `_run` behind its name, which is loaded only when it runs.

No help waits for jax or for the rules, and `lint`, `migrate`, `rule`, `server` and `certificate`
never import jax. Only `MisuseError` is the user's; any other error is a fault of jax-dist, with a
traceback, and never has the exit code of a finding.
"""
