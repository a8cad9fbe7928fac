"""Several processes on one machine, started, watched and ended together. Nothing imports JAX.

What comes in is a command and how many ranks shall run it. What goes out is their output, line by
line, and a `JobOutcome`: how each of them ended, and which one failed first. `job` runs the ranks,
and starts them again if asked to; `ranks` is one of them, with its environment; `outcome` says what
they wrote and how they ended; `reaper` is a program of its own.

No rank, and nothing that it has started in its process group, may outlive the launcher.
"""
