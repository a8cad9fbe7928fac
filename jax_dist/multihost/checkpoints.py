"""The state of a program, saved with Orbax now and then and when the job must leave, and read back.

Orbax writes and reads the arrays, in the background if that is wanted. Ours is what it lacks: one
job at a time saves, ranks agree on what they save, what is damaged gives way to the step before,
and states with a device axis are read without it. Who restores changes nothing in the folder.
"""

import contextlib
import functools
import json
import numbers
import operator
import pathlib
import pickle
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import numpy as np

from jax_dist._exceptions import text_of
from jax_dist.errors import CheckpointError, CheckpointWarning, message, refusal
from jax_dist.multihost import main_thread, ranks
from jax_dist.multihost.agreement import Fingerprint, agree_on, describe
from jax_dist.multihost.collectives import broadcast_one_to_all, is_whole
from jax_dist.multihost.conversion import (
    check_named,
    choices_of,
    imported,
    like_copies,
    one_of_each,
)
from jax_dist.multihost.state_leaves import TypedLeaf, leaves_of
from jax_dist.multihost.step_folders import ITEM, StepWriter, examine, locked, steps_in

_T = TypeVar("_T")
_TIMEOUT = 600.0  # seconds, for rank 0 to read a checkpoint through


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

    def __init__(
        self,
        folder: str | pathlib.Path,
        *,
        every: int | None = None,
        keep: int = 2,
        keep_period: int | None = None,
    ):
        """
        Args:
          folder: where the checkpoints lie, one folder each; made if it is not there.
          every: save each so many steps, and be the only job that saves there; None: only when the
            job must leave, or not at all.
          keep: how many checkpoints to keep, the newest ones.
          keep_period: keep the steps that it divides, too, for good.

        Raises:
          CheckpointInUseError: another job saves there.
          ImportError: Orbax is not installed.
          ValueError: `every`, `keep` or `keep_period` is no integer, or less than 1.
        """
        options = {"every": every, "keep": keep, "keep_period": keep_period}
        for name, number in options.items():
            if number is not None and (not isinstance(number, numbers.Integral) or number < 1):
                raise ValueError(
                    f"Checkpoints: {name} must be an integer of at least 1, not {number}."
                )
        path = pathlib.Path(folder).absolute()
        self._folder = path.resolve() if ".." in path.parts else path  # TensorStore takes no ".."
        self._every, self._kept = every, (keep, keep_period)
        self._last = 0  # the step that was restored or saved last
        self._pending: int | None = None  # the step that is being written
        self._is_closed_later = False
        self._damaged: tuple[int, ...] = ()  # steps
        self._orbax = imported(
            "orbax.checkpoint",
            "orbax-checkpoint>=0.11.26",
            "Orbax writes the checkpoints",
            "Checkpoints",
        )
        self._writer: StepWriter | None = None
        main_thread.watch()
        if every is not None:
            with contextlib.suppress(OSError):  # it may still be read; `save` raises it
                self._open()

    def __enter__(self) -> Self:
        self._is_closed_later = True
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        try:
            self._settle(alone=kind is not None)
        finally:
            self._is_closed_later = False
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def restore(
        self,
        state: Any,
        *,
        from_pmap: bool = False,
        differing: str | Mapping[str, str] | None = None,
    ) -> tuple[Any, int]:
        """The newest checkpoint that is whole; the folder stays as it is.

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
            the copies of a leaf differ, and `differing` does not say what to take; or a process
            cannot read it, or not the folder, though nothing is damaged.
          ValueError: `differing` has another choice, or names no leaf with a device axis.

        Warns:
          CheckpointWarning: a newer checkpoint is damaged.
        """
        choices, leaves = choices_of(differing), leaves_of(state)
        self._settle()
        step, stored, copies, damages = self._newest(leaves, from_pmap=from_pmap)
        folder = self._folder / str(step)
        for damaged, found in damages.items():
            text = message(
                what=f"the checkpoint {self._folder / damaged} is damaged",
                which=found,
                why="its files are not as they were written, or another program made it",
                do=(f"{folder} is restored instead. " if step else "No other one is whole. ")
                + "The next save renames it, if it is one of ours, and deletes nothing of it.",
            )
            warnings.warn(CheckpointWarning(text), stacklevel=2)
        if copies:
            held = {path: np.asarray(stored[path]) for path in copies if path in stored}
            check_named(choices, held)
            option = 'differing=, as in differing={"batch_stats": "mean"}'
            stored |= one_of_each(held, choices, where=str(folder), option=option)
        restored = [
            leaf.restored(stored[leaf.path]) if leaf.path in stored else leaf.given
            for leaf in leaves
        ]
        self._damaged, self._last = tuple(map(int, damages)), step
        ranks.progress.say(restored=step, reached=step)
        return jax.tree.unflatten(jax.tree.structure(state), restored), step

    def save(self, step: int, state: Any, *, force: bool = False, wait: bool = True) -> bool:
        """Saves where it is time to: each `every` steps, and when the job must leave.

        Call it once in each step, in every process.

        Args:
          step: how many steps the state has seen.
          state: a tree of arrays of JAX and NumPy, numbers, and random keys. In several processes,
            what is not an array over all of them must be the same in each.
          force: save in any case, as after the last step.
          wait: until it is on the disk, as always when the job must leave, or without a `with`
            block. With False, only until the values are copied; the next call that saves or
            restores, and the end of the block, wait for the rest, and raise what went wrong.

        Returns:
          Whether it was saved, or is being saved.

        Raises:
          CheckpointError: a leaf cannot be saved, the disk is full or read-only, or the folder has
            newer checkpoints, which were not restored. The older checkpoints are as they were.
          CheckpointInUseError: another job saves there.
          DisagreementError: the state is not the same in all processes.
          RuntimeError: as `preempted` does.
          TypeError: `step` is no integer.
        """
        try:
            step = operator.index(step)  # the name of its folder
        except TypeError:
            raise TypeError(f"Checkpoints.save: step must be an integer, not {step}.") from None
        leaves_now = self.preempted(step)
        is_due = self._every is not None and step % self._every == 0
        if leaves_now:
            self._settle()
        if not (leaves_now or is_due or force) or step <= (self._pending or self._last):
            return False
        leaves = leaves_of(state)
        _check_same(leaves)
        self._settle()
        try:
            writer = self._open()
            self._in_all(lambda: writer.begin(step, self._last, self._damaged))
            self._in_all(lambda: writer.write(step, leaves))
        except CheckpointError:
            raise
        except Exception as error:  # of Orbax, TensorStore or the disk, whatever it is
            raise self._not_saved(step, error) from error
        self._pending = step
        if wait or leaves_now or not self._is_closed_later:
            self._settle()
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

    def _settle(self, *, alone: bool = False) -> None:
        """Waits until what is being written is whole; alone: this process may be the only one."""
        if self._pending is None or self._writer is None:
            return
        step, writer = self._pending, self._writer
        try:
            writer.finish() if alone else self._in_all(writer.finish)
        except Exception as error:
            self._pending = None
            if not alone:
                raise self._not_saved(step, error) from error
            warnings.warn(CheckpointWarning(str(self._not_saved(step, error))), stacklevel=3)
        else:
            self._pending, self._last, self._damaged = None, step, ()

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        if self._writer is not None:
            self._writer.clean()
        return refusal(
            CheckpointError,
            what=f"step {step} is not saved",
            which=[text_of(error).partition("\n")[0]],
            why=f"it could not be written to {self._folder}",
            do="Make room there, or let it be written to. The checkpoints that are there are "
            "as they were.",
        )

    def _newest(
        self, leaves: Sequence[TypedLeaf], *, from_pmap: bool
    ) -> tuple[int, dict[str, Any], dict[str, np.ndarray], dict[str, list[str]]]:
        """The newest whole step, or 0; its arrays; those that are copies; what is damaged."""
        tried, trouble = 0, ""
        own = jax.process_index() == 0
        while True:
            try:
                # Rank 0 looks, and tells the others: they must not restore different ones.
                answer = self._in_all(lambda: json.dumps(self._look()) if own else "")
            except OSError as error:
                raise _unreadable(self._folder, text_of(error)) from error
            step, saved, damages = json.loads(broadcast_one_to_all(answer, timeout=_TIMEOUT))
            if step == 0:
                return 0, {}, {}, damages
            copies = like_copies(leaves, saved) if from_pmap else {}
            self._check_fits(step, saved, leaves, copies)
            if step == tried:
                raise _unreadable(self._folder / str(step), trouble)
            try:
                read = functools.partial(self._read, step, leaves, copies)
                return step, self._in_all(read), copies, damages
            except OSError as error:  # it may have been removed, by the job that saves
                tried, trouble = step, text_of(error)

    def _check_fits(
        self,
        step: int,
        saved: Mapping[str, str],
        leaves: Sequence[TypedLeaf],
        copies: Mapping[str, np.ndarray],
    ) -> None:
        wanted = {leaf.path: leaf.type for leaf in leaves}
        none = "not there"
        which = [
            f"{path} is {saved.get(path, none)}, in the state {wanted.get(path, none)}"
            for path in {**saved, **wanted}
            if saved.get(path) != wanted.get(path) and path not in copies
        ]
        if len({len(each) for each in copies.values()}) > 1:
            which = [f"{path} has {len(each)} copies" for path, each in copies.items()]
        if which:
            raise refusal(
                CheckpointError,
                what=f"the checkpoint {self._folder / str(step)} does not fit the state",
                which=which,
                why="another program wrote it, or this one was changed since",
                do="Give `restore` a state like the one that was saved, or use another folder.",
            )

    def _look(self) -> tuple[int, dict[str, str], dict[int, Any]]:
        """The newest whole step, or 0, its leaves; and what is wrong with those after it."""
        damages = {}
        for step in reversed(steps_in(self._folder)):
            folder = self._folder / str(step)
            leaves, found = examine(folder)
            if not found:
                return step, leaves, damages
            if not folder.is_dir():  # removed since, by the job that saves: a newer one is there
                return self._look()
            damages[step] = found
        return 0, {}, damages

    def _read(
        self, step: int, leaves: Sequence[TypedLeaf], copies: Mapping[str, Any]
    ) -> dict[str, Any]:
        stored = [leaf for leaf in leaves if np.size(leaf.given)]
        if not stored:
            return {}
        like = {leaf.path: copies.get(leaf.path, leaf.like()) for leaf in stored}
        how = self._orbax.args.StandardRestore(like)
        # Not the manager: where one process fails, it would let the others wait.
        with contextlib.closing(self._orbax.StandardCheckpointHandler()) as handler:
            return dict(handler.restore(self._folder / str(step) / ITEM, args=how))

    def _open(self) -> StepWriter:
        """Makes sure that no other job saves there."""
        if self._writer is None:
            lock = self._in_all(lambda: locked(self._folder) if jax.process_index() == 0 else None)
            self._writer = StepWriter(self._orbax, self._folder, self._kept, lock, _TIMEOUT)
        return self._writer

    def _in_all(self, action: Callable[[], _T]) -> _T:
        """Where it fails in one process, all raise that CheckpointError, or an OSError."""
        result, trouble = None, None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  # of Orbax, TensorStore or the disk
            is_plain = isinstance(error, CheckpointError | OSError)
            text = f"{type(error).__name__}: {text_of(error)}".partition("\n")[0]
            trouble = error if is_plain else OSError(text)
        given = pickle.dumps(trouble)
        told = agree_on("Checkpoints", Fingerprint("", {}), timeout=_TIMEOUT, give=given)
        for each in map(pickle.loads, told.values()):
            if each is not None:
                raise each
        return typing.cast("_T", result)


def _unreadable(path: pathlib.Path, trouble: str) -> CheckpointError:
    return refusal(
        CheckpointError,
        what=f"{path} cannot be read",
        which=[trouble],
        why="nothing shows that it is damaged, so nothing else is taken instead",
        do="Mend what the error names, as missing permissions or too little memory, and start "
        "again.",
    )


def _check_same(leaves: Sequence[TypedLeaf]) -> None:
    """Whatever each process has for itself: only that of rank 0 is written."""
    held = {
        leaf.path: leaf.type if is_whole(leaf.given) else describe(leaf.given, values=True)
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
