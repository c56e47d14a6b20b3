"""Batches: their parts, the loaders that yield them, and random seeds."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from dmcp.errors import DataError
from dmcp.runtime.distributed import World
from dmcp.tracing.modules import tensors_in

HELD_OUT = 0.5  # share of the test images that `within` decides on, and that are then not tested on


class Loader(Protocol):
    """Yields batches. If it also has `set_epoch(int)`, the loops call it at the start of each epoch.

    With `starting_at(int)`, which yields the batches from that number on, an epoch is resumed without drawing the
    batches before.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


def input_of(batch: Any) -> Any:
    """The input of the model: a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(batch, Tensor):
        return batch
    return _part(batch, 0, "input", "pixel_values")


def labels_of(batch: Any) -> Tensor:
    """The labels, which the classification loss and the accuracy use."""
    if isinstance(batch, Tensor):
        raise DataError(
            f"A batch is a tensor {tuple(batch.shape)} without labels: the loader must give (input, labels), as "
            "DataLoader(TensorDataset(images, labels), batch_size=64) does."
        )
    labels = _part(batch, 1, "label", "labels")
    if isinstance(labels, int) or (isinstance(labels, Tensor) and not labels.ndim):
        raise DataError(
            "A batch has a single label: the loader must give batches, as DataLoader(samples, batch_size=64) does."
        )
    if not isinstance(labels, Tensor):
        raise DataError(f"The labels of a batch must be a tensor, not a {type(labels).__name__}.")
    return labels


def size_of(batch: Any) -> int:
    """The number of samples in the batch: the first dim of the first tensor of its input."""
    tensors = tensors_in(input_of(batch))
    if not tensors or not tensors[0].ndim:
        raise DataError(
            "The input of a batch has no tensor with a batch dimension: the loader must give whole batches."
        )
    return tensors[0].shape[0]


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    if isinstance(batch, Mapping):
        batch = dict(batch)  # the mappings of transformers are not dicts
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first tensor; the CPU for a model without tensors."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def widest(device: torch.device) -> torch.dtype:
    """The dtype to sum in: float64, which Apple's GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64


def length_of(loader: Any, name: str = "loader") -> int:
    """The number of batches in an epoch; DataError for a loader without a length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # the second: torch's loader of an iterable dataset
        raise DataError(f"The {name} has no length: pass a list of batches, or give its class a __len__.") from None


def check_parts(loader: Any, world: World) -> None:
    """Refuse a loader whose sampler, like torch's, repeats samples so that all ranks have equally many."""
    sampler = getattr(loader, "sampler", None)
    total_size = getattr(sampler, "total_size", 0)
    if world.size > 1 and total_size > len(getattr(sampler, "dataset", ())):
        raise DataError(
            "The loader of a rank repeats samples, so a metric would count them twice: split the data instead."
        )


def is_used_up(loader: Any) -> bool:
    """Whether batches that are drawn from a loader may not come again."""
    return isinstance(loader, Iterator) or isinstance(getattr(loader, "dataset", None), IterableDataset)


def peek(loader: Any) -> list[Any] | None:
    """A list of the first batch that holds a sample; empty if there is none, None if looking would use it up."""
    if is_used_up(loader):
        return None
    return list(itertools.islice((batch for batch in loader if size_of(batch)), 1))


def ends_with_one_sample(loader: Any) -> bool:
    """Whether the last of several batches is known to have one sample: that of a torch DataLoader with a batch size."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if loader.batch_size in (None, 1) or loader.drop_last:
        return False
    return len(loader.sampler) % loader.batch_size == 1  # type: ignore[arg-type]


def start_epoch(loader: Any, epoch: int) -> None:
    """Tell the loader, or the sampler of a torch DataLoader, which epoch is next."""
    for owner in (loader, getattr(loader, "sampler", None)):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
            return


def batches_from(loader: Loader, epoch: int, skip: int = 0) -> Iterator[Any]:
    """The batches of one epoch from number `skip` on.

    A loader without `starting_at` draws the skipped batches once more, so that its random numbers go on as before.
    """
    start_epoch(loader, epoch)
    starting_at = getattr(loader, "starting_at", None)
    if starting_at:
        return iter(starting_at(skip))
    batches = iter(loader)
    for _ in itertools.islice(batches, skip):
        pass
    return batches


class FewBatches:
    """The first batches of each epoch of a loader; everything else is the loader's own."""

    def __init__(self, loader: Loader, count: int) -> None:
        self.loader = loader
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.loader, self.count)

    def __len__(self) -> int:
        return self.count

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "count"):  # asked of a copy that is being made
            raise AttributeError(name)
        attribute = getattr(self.loader, name)
        if name == "starting_at":
            return lambda skip: itertools.islice(attribute(skip), self.count - skip)
        return attribute


def hold_out(loader: Any, share: float) -> tuple[Loader, Loader] | None:
    """Two loaders: one without a share of the samples, and one of that share, in a fixed order.

    Of a list, whole batches are held out; of a torch DataLoader, samples drawn at random. None for any other loader,
    which may give other samples each time, and where one part would be empty.
    """
    if isinstance(loader, list | tuple):
        kept, held_out = _parts(len(loader), share)
        if not kept or not held_out:
            return None
        return [loader[index] for index in kept], [loader[index] for index in held_out]

    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    is_shuffled = type(loader.sampler) is RandomSampler and not loader.sampler.replacement
    if not is_shuffled and type(loader.sampler) is not SequentialSampler:
        return None
    kept, held_out = _parts(length_of(loader.dataset, "data set of the loader"), share)
    if not kept or not held_out:
        return None
    return (
        _with_samples(loader, kept, shuffle=is_shuffled),
        _with_samples(loader, held_out, shuffle=False),
    )


def _parts(count: int, share: float) -> tuple[list[int], list[int]]:
    """Divide numbers at random: (those that are kept, the share that is held out), each in order."""
    order = torch.randperm(count, generator=generator(0)).tolist()
    held_out = math.ceil(share * count)
    return sorted(order[held_out:]), sorted(order[:held_out])


def _with_samples(loader: DataLoader[Any], samples: list[int], *, shuffle: bool) -> DataLoader[Any]:
    """A DataLoader like another one, for some of its samples, of which it drops none."""
    return DataLoader(
        Subset(loader.dataset, samples),
        batch_size=loader.batch_size,
        shuffle=shuffle,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=False,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def share_of(number: int, batch_size: int, images: int, world: World) -> slice:
    """This rank's part of a batch, as positions in the order of an epoch; the sizes of parts differ by one at most."""
    start = number * batch_size
    size = min(batch_size, images - start)
    part, rest = divmod(size, world.size)  # the first ranks take one image of the rest each
    start += world.rank * part + min(world.rank, rest)
    stop = start + part + (world.rank < rest)
    return slice(start, stop)


def core_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mix(*numbers: int) -> int:
    """One seed from several numbers, such as (seed, epoch, index)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(*numbers: int) -> torch.Generator:
    """A fresh CPU generator for these numbers."""
    return torch.Generator().manual_seed(mix(*numbers))


def as_generator(seed: int | torch.Generator | None) -> torch.Generator | None:
    """A fresh generator for a seed; a generator is returned as it is."""
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    return generator(seed)


def _part(batch: Any, index: int, key: str, key_of_transformers: str) -> Any:
    """The entry of a tuple at this index, or of a dict under one of these keys."""
    entry: int | str = index
    if isinstance(batch, Mapping):
        entry = key_of_transformers
        if key in batch:
            entry = key
    try:
        return batch[entry]
    except (KeyError, IndexError, TypeError):
        keys = ""
        if isinstance(batch, Mapping):
            keys = f", but {', '.join(map(repr, batch))}"
        raise DataError(
            f"This {type(batch).__name__} has no {key}{keys}: a batch must be (input, labels), or a dict with "
            '"input" and "label" or "pixel_values" and "labels".'
        ) from None
