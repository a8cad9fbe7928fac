"""The state of a program, saved with Orbax now and then and when the job must leave, and read back.

A checkpoint is a folder that Orbax writes, with one file of ours in it, `jax_dist.json`: what the
leaves are, and the checksums of the other files. It gets its name when all of this is on the disk,
and only then the oldest one goes. What is damaged later is not read, and never deleted.
"""

import json
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from jax_dist._exceptions import text_of
from jax_dist.errors import (
    CheckpointError,
    CheckpointWarning,
    MissingPackageError,
    message,
    refusal,
)
from jax_dist.multihost import main_thread, ranks
from jax_dist.multihost.agreement import Fingerprint, agree_on
from jax_dist.multihost.collectives import broadcast_one_to_all
from jax_dist.multihost.step_folders import (
    StepFolders,
    TypedLeaf,
    check_named,
    choices_of,
    leaves_of,
    one_of_each,
)

_TIMEOUT = 600.0  # seconds, for rank 0 to read a checkpoint through
_ITEM = "default"  # the folder of a step in which Orbax's own manager would look


class Checkpoints:
    """Saves and restores the state of a loop; a context manager.

    In several processes, every process must make the same calls, and see the same folder.

    >>> import tempfile, jax.numpy as jnp
    >>> folder = tempfile.mkdtemp()
    >>> def train(steps):
    ...     with Checkpoints(folder, every=2) as checkpoints:
    ...         state, start = checkpoints.restore({"w": jnp.zeros(3)})
    ...         for step in range(start + 1, steps + 1):
    ...             state = {"w": state["w"] + step}
    ...             checkpoints.save(step, state)
    ...             if checkpoints.preempted(step):
    ...                 break
    ...     return start, state["w"].tolist()
    >>> train(steps=2)
    (0, [3.0, 3.0, 3.0])
    >>> train(steps=4)
    (2, [10.0, 10.0, 10.0])
    """

    def __init__(self, folder: str | pathlib.Path, *, every: int | None = None, keep: int = 2):
        """
        Args:
          folder: where the checkpoints lie, one folder each; made if it is not there.
          every: save each so many steps; None: only when the job must leave.
          keep: how many checkpoints to keep, the newest ones.

        Raises:
          MissingPackageError: Orbax is not installed.
          ValueError: `every` or `keep` is less than 1.
        """
        for name, number in (("every", every), ("keep", keep)):
            if number is not None and number < 1:
                raise ValueError(f"Checkpoints: {name} must be at least 1, not {number}.")
        self._folder = pathlib.Path(folder).absolute()
        self._every, self._keep = every, keep
        self._last = 0  # the step that was restored or saved last
        self._damaged: tuple[int, ...] = ()  # steps
        self._orbax = _import_orbax()
        self._checkpointer = self._orbax.Checkpointer(self._orbax.StandardCheckpointHandler())
        self._steps = StepFolders(self._folder)
        if jax.process_index() == 0:
            self._steps.clean()
        main_thread.watch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def restore(
        self,
        state: Any,
        *,
        from_pmap: bool = False,
        differing: str | Mapping[str, str] | None = None,
    ) -> tuple[Any, int]:
        """The newest checkpoint that is whole.

        Args:
          state: a tree like the one that was saved. What is read gets the same types, and lies on
            the same devices; the number of processes and devices may be another one.
          from_pmap: also read a state whose leaves have a leading device axis that `state` has
            not. All copies of a leaf must be equal to the bit; the first one is taken.
          differing: what to take of leaves whose copies differ: `"mean"` or `"first"`, or a
            mapping from a part of a leaf's path, as in `{"batch_stats": "mean"}`.

        Returns:
          The state and the step that were given to `save`; without any checkpoint, the state as it
          is given here, and 0.

        Raises:
          CheckpointError: the checkpoint has other leaves, or leaves of other shapes or dtypes;
            or the copies of a leaf differ, and `differing` does not say what to take.
          ValueError: `differing` has another choice, or names no leaf with a device axis.

        Warns:
          CheckpointWarning: a newer checkpoint is damaged.
        """
        choices = choices_of(differing)
        # Rank 0 looks, and tells the others: they must not restore different ones.
        answer = json.dumps(self._look()) if jax.process_index() == 0 else ""
        step, saved, damages = json.loads(broadcast_one_to_all(answer, timeout=_TIMEOUT))
        for damage in damages.values():
            warnings.warn(CheckpointWarning(damage), stacklevel=2)
        self._damaged, self._last = tuple(map(int, damages)), step
        ranks.progress.say(restored=step, reached=step)
        if step == 0:
            return state, 0
        leaves = leaves_of(state)
        folder = self._steps.path(step)
        copies = _copies(folder, saved, leaves, from_pmap=from_pmap)
        like = {
            leaf.path: copies[leaf.path] if leaf.path in copies else leaf.like()
            for leaf in leaves
            if leaf.is_stored
        }
        stored = {}
        if like:
            how = self._orbax.args.StandardRestore(like)
            stored = dict(self._checkpointer.restore(folder / _ITEM, args=how))
        if copies:
            held = {path: np.asarray(stored[path]) for path in copies if path in stored}
            check_named(choices, held)
            option = 'differing=, as in differing={"batch_stats": "mean"}'
            stored |= one_of_each(held, choices, where=str(folder), option=option)
        restored = [leaf.restored(stored.get(leaf.path)) for leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(state), restored), step

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        """Saves where it is time to: each `every` steps, and when the job must leave.

        Call it once in each step, in every process.

        Args:
          step: how many steps the state has seen.
          state: a tree of arrays of JAX and NumPy, numbers, and random keys. In several processes,
            what is not an array over all of them must be the same in each.
          force: save in any case, as after the last step.

        Returns:
          Whether it was saved.

        Raises:
          CheckpointError: a leaf cannot be saved, the disk is full or read-only, or the folder has
            newer checkpoints, which were not restored. The older checkpoints are as they were.
          DisagreementError: the state is not the same in all processes.
          RuntimeError: as `preempted` does.
        """
        is_due = self._every is not None and step % self._every == 0
        if not (self.preempted(step) or is_due or force) or step <= self._last:
            return False
        leaves = leaves_of(state)
        _check_same(leaves)
        newer = [each for each in self._steps.steps() if each > self._last]
        unknown = [f"step {each}" for each in newer if each not in self._damaged]
        if unknown:  # what is newer by number would be taken for the newest
            raise refusal(
                CheckpointError,
                what=f"step {step} is not saved: {self._folder} holds newer checkpoints",
                which=unknown,
                why="only the newest are kept, so this one would be removed immediately",
                do="Call `restore` first, or use another folder.",
            )
        self._write(step, leaves)
        self._last = step
        return True

    def preempted(self, step: int) -> bool:
        """Whether the job must leave now; `save` has saved the state of this step then.

        Args:
          step: how many steps the state has seen.

        Returns:
          The answer of `jax_dist.multihost.preempted`, the same in all processes.

        Raises:
          RuntimeError: JAX's preemption service is switched off.
        """
        return main_thread.preempted(step)

    def _look(self) -> tuple[int, dict[str, str], dict[int, str]]:
        """The newest whole step, or 0, its leaves; and what is wrong with those after it."""
        damages: dict[int, str] = {}
        for step in reversed(self._steps.steps()):
            folder = self._steps.path(step)
            leaves, found = self._steps.examine(step)
            if not found:
                return step, leaves, damages
            damages[step] = message(
                what=f"the checkpoint {folder} is damaged",
                which=found,
                why="its files are not as they were written: the disk is failing, or somebody "
                "changed them",
                do="An older one is restored if there is one. The next save sets this one aside, "
                f"as {folder.name}.damaged; delete it when it is of no use.",
            )
        return 0, {}, damages

    def _write(self, step: int, leaves: Sequence[TypedLeaf]) -> None:
        unfinished = self._steps.unfinished(step)
        stored = {leaf.path: leaf.value() for leaf in leaves if leaf.is_stored}
        self._in_rank_0(step, lambda: self._steps.begin(step))
        if stored:
            how = self._orbax.args.StandardSave(stored)
            try:
                self._checkpointer.save(unfinished / _ITEM, args=how, force=True)
            except Exception as error:  # of Orbax, TensorStore or the disk, whatever it is
                self._steps.abandon(step)  # it takes room that may be needed
                raise _not_saved(self._folder, step, text_of(error)) from error
        self._in_rank_0(step, lambda: self._finish(step, leaves))

    def _in_rank_0(self, step: int, action: Callable[[], None]) -> None:
        """Rank 0 does it, and all hear how it went."""
        trouble = ""
        if jax.process_index() == 0:
            try:
                action()
            except OSError as error:
                trouble = str(error)
                self._steps.abandon(step)
        trouble = broadcast_one_to_all(trouble, timeout=_TIMEOUT)
        if trouble:
            raise _not_saved(self._folder, step, trouble)

    def _finish(self, step: int, leaves: Sequence[TypedLeaf]) -> None:
        self._steps.write_manifest(step, leaves)
        for damaged in self._damaged:
            if damaged in self._steps.steps():
                self._steps.set_aside(damaged)
        self._steps.commit(step)
        self._steps.keep(self._keep)


def _import_orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "orbax":
            raise
        raise MissingPackageError(
            message(
                what="Checkpoints needs a package that is not installed",
                which=["orbax-checkpoint"],
                why="Orbax writes the checkpoints",
                do='Run: pip install "orbax-checkpoint>=0.11"',
            ),
            name="orbax",
        ) from None
    return orbax


def _copies(
    folder: pathlib.Path,
    saved: Mapping[str, str],
    leaves: Sequence[TypedLeaf],
    *,
    from_pmap: bool,
) -> dict[str, np.ndarray]:
    """What reads the leaves that were saved as copies, the same number of each; the others fit."""
    found: list[tuple[TypedLeaf, int]] = []
    if from_pmap:
        numbers = [(leaf, leaf.copies_in(saved.get(leaf.path, ""))) for leaf in leaves]
        found = [(leaf, number) for leaf, number in numbers if number]
    copies = {leaf.path: leaf.like_copies(number, saved[leaf.path]) for leaf, number in found}
    wanted = {leaf.path: leaf.type for leaf in leaves}
    which = [
        f"{path} is {saved.get(path, 'not there')}, in the state {wanted.get(path, 'not there')}"
        for path in {**saved, **wanted}
        if saved.get(path) != wanted.get(path) and path not in copies
    ]
    if len({number for _, number in found}) > 1:
        which = [f"{leaf.path} has {number} copies" for leaf, number in found]
    if which:
        raise refusal(
            CheckpointError,
            what=f"the checkpoint {folder} does not fit the state",
            which=which,
            why="another program wrote it, or this one was changed since",
            do="Give `restore` a state like the one that was saved, or use another folder.",
        )
    return copies


def _check_same(leaves: Sequence[TypedLeaf]) -> None:
    """Whatever each process has for itself: only that of rank 0 is written."""
    held = {
        leaf.path: leaf.type
        if leaf.is_whole
        else Fingerprint.of(leaf.given, values=True).leaves[""]
        for leaf in leaves
    }
    agree_on(
        "Checkpoints.save",
        Fingerprint("", held),
        timeout=_TIMEOUT,
        do="Compute it in the same way everywhere, or make it part of an array over all processes: "
        'by jax_dist.pmap(..., arrays="global") or '
        "jax_dist.multihost.host_local_array_to_global_array.",
    )


def _not_saved(folder: pathlib.Path, step: int, trouble: str) -> CheckpointError:
    return refusal(
        CheckpointError,
        what=f"step {step} is not saved",
        which=[trouble.partition("\n")[0]],
        why=f"it could not be written to {folder}",
        do="Make room there, or let it be written to. The checkpoints that are there are as "
        "they were.",
    )
