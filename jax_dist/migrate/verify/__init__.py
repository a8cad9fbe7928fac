"""Proves a migration: runs the program, and says of each place how sure it is.

In come a command and the files of a migration, before and after. Out comes a `Ledger` with an entry
for each place, from "different" to "same program", and a certificate of it where one is wanted.

`trial` writes programs that report their run (`edits`, `program_text`), runs them in a
`sandbox` with the package `recording` inside, and judges what they wrote down (`evidence`,
`comparison`). Programs are proved equal by `equivalence` and `slices` from their texts alone.

No run may reach the user's files. No place may be called surer than its evidence shows. The part
that a certificate rests on, `equivalence`, `slices` and `certificate`, never imports jax.
"""
