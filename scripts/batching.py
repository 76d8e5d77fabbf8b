"""Endless training micro-batches whose content follows from the seed and from where a run is, and from nothing else.

Of data that are indexed, an update sees the next `global_train_batch_size` positions of one endless sequence: the data
in a new order, then in another, and so on. Every example is drawn (masked, augmented) from the seed and its position.
So a run goes on from any update without a look at what came before it, on any number of processes. A stream has a
position that its library keeps: `StreamedBatches`.
"""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets import IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lion_transformers.scripts.arguments import UsageError
from lion_transformers.scripts.reading import raise_in_all


class Batches(Protocol):
    """Micro-batches on their device; to be closed, or workers wait to be found by the garbage collection."""

    def __next__(self) -> dict[str, Tensor]: ...

    def close(self) -> None: ...


def derived_seed(*numbers: int) -> int:
    """A seed that is as good as independent of those of other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@contextmanager
def drawing_from(*numbers: int) -> Iterator[None]:
    """Let torch draw on the CPU from `derived_seed` of the numbers, and afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_seed(*numbers))
        yield


def shuffled(num_examples: int, seed: int) -> Callable[[int], Sequence[int]]:
    """From the number of a pass to its order: all examples once."""
    return lambda epoch: np.random.default_rng([seed, epoch]).permutation(num_examples)


@dataclass
class EndlessPositions(Sampler):
    """This process's micro-batches of (position, index of the example), without end.

    Process r of W takes every W-th position from r on: neighbours, which may be copies of one image, go to different
    processes, and the positions of an update are the same whatever W is.

    Args:
        order: from the number of a pass over the data to the indices of its examples.
        batch_size: positions in a micro-batch.
        start: micro-batches of this process that have been seen.
        num_processes, process_index: W and r.
    """

    order: Callable[[int], Sequence[int]]
    batch_size: int
    start: int
    num_processes: int
    process_index: int

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        keys = self._keys()
        while True:
            yield list(itertools.islice(keys, self.batch_size))

    def _keys(self) -> Iterator[tuple[int, int]]:
        first = self.start * self.batch_size * self.num_processes + self.process_index
        epoch, order = 0, self.order(0)
        for position in itertools.count(first, self.num_processes):
            if position // len(order) != epoch:
                epoch = position // len(order)
                order = self.order(epoch)
            yield position, int(order[position % len(order)])


@dataclass
class DrawnExamples(Dataset):
    """Examples by (position, index), each drawn from the seed and its position."""

    examples: Any
    seed: int

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, Any]:
        position, index = key
        with drawing_from(self.seed, position):
            return position, self.examples[index]


@dataclass
class DrawnCollator:
    """A batch of `DrawnExamples`; what is drawn for all of them together is drawn from the seed and the first one."""

    collator: Callable[[list[Any]], dict[str, Tensor]]
    seed: int

    def __call__(self, rows: list[tuple[int, Any]]) -> dict[str, Tensor]:
        positions, examples = zip(*rows, strict=True)
        with drawing_from(self.seed, positions[0], 1):
            return self.collator(list(examples))


def shield_from_signals(_worker: int) -> None:
    """Let a loader's worker end when its run says so alone: a run that is stopped, as all its group is, saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait_for_parent() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=wait_for_parent, daemon=True).start()


def endless_batches(
    accelerator: Accelerator,
    examples: Sized,
    order: Callable[[int], Sequence[int]],
    collator: Callable[[list[Any]], dict[str, Tensor]],
    *,
    batch_size: int,
    num_workers: int,
    seed: int,
    start: int,
    unit: str,
) -> Batches:
    """This process's micro-batches on its device, full ones only, without end.

    Args:
        accelerator: tells which process this is.
        examples: indexed.
        order: from the number of a pass over the data to the indices of its examples.
        collator: makes a batch.
        batch_size: of a micro-batch.
        num_workers: processes that load batches; 0 loads them in this one.
        seed: of what is drawn for examples and batches.
        start: micro-batches of this process that have been seen.
        unit: what the examples are, for the error.

    Raises:
        UsageError: there are too few examples for one batch on every process.
    """
    if len(examples) < batch_size * accelerator.num_processes:
        raise too_small(batch_size, unit, accelerator.num_processes)
    positions = EndlessPositions(order, batch_size, start, accelerator.num_processes, accelerator.process_index)
    loader = DataLoader(
        DrawnExamples(examples, seed),
        batch_sampler=positions,
        collate_fn=DrawnCollator(collator, seed),
        num_workers=num_workers,
        worker_init_fn=shield_from_signals,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # else starting a loader would draw from the run's generator
    )
    return (send_to_device(batch, accelerator.device, non_blocking=True) for batch in loader)


def too_small(batch_size: int, unit: str, num_processes: int) -> UsageError:
    return UsageError(
        f"the training data are too small for one batch of {batch_size} {unit} on each of {num_processes} devices:"
        " give more of them, or a smaller per_device_train_batch_size."
    )


def shuffle_block(batch: dict[str, list], indices: list[int], seed: int) -> dict[str, list]:
    """A block of a stream in an order of its own.

    Blocks, not the buffer of datasets' `shuffle`: what is in that when a run stops would be lost.
    """
    order = np.random.default_rng([seed, indices[0]]).permutation(len(indices))
    return {name: [column[row] for row in order] for name, column in batch.items()}


def shuffle_stream(stream: IterableDataset, seed: int, block_size: int) -> IterableDataset:
    """Files in a random order, examples in a random order within blocks; its position can be saved and restored."""
    files = stream.shuffle(seed=seed, buffer_size=1)
    return files.map(shuffle_block, batched=True, batch_size=block_size, with_indices=True, fn_kwargs={"seed": seed})


class StreamedBatches:
    """This process's micro-batches of a stream on its device, full ones only, without end.

    Args:
        accelerator: its device gets the batches.
        stream: from the number of a pass over the data to what this process reads in it.
        collator, batch_size, num_workers, unit: as for `endless_batches`.

    Raises:
        UsageError: there are too few examples for one batch in the first pass.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        stream: Callable[[int], Iterable[Any]],
        collator: Callable[[list[Any]], dict[str, Tensor]],
        *,
        batch_size: int,
        num_workers: int,
        unit: str,
    ):
        self.accelerator, self.stream, self.collator = accelerator, stream, collator
        self.batch_size, self.num_workers, self.unit = batch_size, num_workers, unit
        self.is_empty = True  # as far as it has been read
        self._open(0)

    def _open(self, epoch: int, position: dict[str, Any] | None = None) -> None:
        self.epoch = epoch
        self.loader = StatefulDataLoader(
            self.stream(epoch),
            batch_size=self.batch_size,
            collate_fn=self.collator,
            drop_last=True,
            num_workers=self.num_workers,
            worker_init_fn=shield_from_signals,
            pin_memory=self.accelerator.device.type == "cuda",
            generator=torch.Generator(),
        )
        if position is not None:
            self.loader.load_state_dict(position)
        self.batches = iter(self.loader)

    def __next__(self) -> dict[str, Tensor]:
        batch = next(self.batches, None)
        if batch is None and self.is_empty:
            raise too_small(self.batch_size, self.unit, self.accelerator.num_processes)
        while batch is None:  # a process can have nothing to read in a pass with fewer files than processes
            self._open(self.epoch + 1)
            batch = next(self.batches, None)
        self.is_empty = False
        return send_to_device(batch, self.accelerator.device, non_blocking=True)

    def close(self) -> None:
        del self.batches, self.loader

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_empty = False
        self._open(state["epoch"], state["loader"])


def check_first_batch(batches: Batches) -> None:
    """Make the first batch: what is wrong with it is found before anything takes time.

    Raises:
        UsageError: of one process, in all of them, so that none waits for it.
    """
    failure = None
    try:
        next(batches)
    except UsageError as error:
        failure = str(error)
    finally:
        batches.close()
    raise_in_all(failure)
