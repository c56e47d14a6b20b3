"""A process per model, so that a crash, a leak or an endless loop ends with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from zoo.models import Entry

ALONE_PARAMS = 250_000_000  # two models larger than this do not fit in memory at the same time

Found = TypeVar("Found")


class WorkerError(Exception):
    """A worker that did not answer: it died, or the time was up."""


def run(
    entries: Sequence[Entry], work: Callable[[Entry], Found], jobs: int, limit_seconds: float
) -> Iterator[tuple[Entry, Found | WorkerError]]:
    """What `work` found out about each entry, as it comes: several models at a time, then the largest one by one."""
    small = [entry for entry in entries if entry.params <= ALONE_PARAMS]
    large = [entry for entry in entries if entry.params > ALONE_PARAMS]
    for workers, batch in ((jobs, small), (1, large)):
        with ThreadPoolExecutor(workers) as pool:
            futures = {pool.submit(isolated, work, entry, limit_seconds): entry for entry in batch}
            try:
                for future in as_completed(futures):
                    error = future.exception()
                    if error is not None and not isinstance(error, WorkerError):
                        raise error
                    yield futures[future], error or future.result()
            finally:  # when the run is stopped, models that have not begun are dropped
                pool.shutdown(wait=False, cancel_futures=True)


def isolated(work: Callable[[Entry], Found], entry: Entry, limit_seconds: float) -> Found:
    """Call `work` in a fresh process with one torch thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])  # torch is imported once, not once per model
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, work, entry), daemon=True)
    process.start()
    sender.close()  # the child has the other end: when it dies, recv ends
    try:
        if not receiver.poll(limit_seconds):
            raise WorkerError(f"over time: {limit_seconds:g} s")
        found: Found = receiver.recv()
    except EOFError:
        process.join()
        raise WorkerError(f"process died: exit code {process.exitcode} (-9: probably out of memory)") from None
    finally:
        process.kill()
        process.join()
    return found


def _answer(sender: Connection, work: Callable[[Entry], Found], entry: Entry) -> None:
    torch.set_num_threads(1)
    sender.send(work(entry))
