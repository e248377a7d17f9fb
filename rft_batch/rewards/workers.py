"""Reward functions in processes of their own, with a limit on time that really ends the work.

A worker gets one completion at a time, so a time-out or a death says which one it was. The pool is
our own because those at hand lose work when a worker dies: with pebble 5.2 a process that ends at
once could break the pool for all tasks (its manager looks for the dead before it has read what they
had begun), and concurrent.futures breaks always. Workers are started as plain programs, not by
multiprocessing's spawn, which would run a user's script again unless it is guarded.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any

from rft_batch.errors import DataError, RftError
from rft_batch.import_strings import import_callable
from rft_batch.rewards.calls import Outcome, Reward, call_here

_SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class _Item:
    """One reward's call with one completion."""

    reward: int
    """Place among the rewards that the workers load."""
    name: str
    arguments: dict[str, list[Any]]


class _Worker:
    """A process, and the item that it is at."""

    def __init__(self, references: Sequence[str]) -> None:
        ours, theirs = Pipe()
        program = (
            f"import sys; sys.path[:] = {[p for p in sys.path if isinstance(p, str)]!r}; "
            f"from rft_batch.rewards.workers import serve; serve({theirs.fileno()})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # A group of its own: Ctrl-C does not reach it, and what it starts ends with it.
            process_group=0,
        )
        theirs.close()
        self.connection = ours
        self.ready = False
        self.place: int | None = None
        self.deadline = float("inf")
        with suppress(OSError):  # it died at once, which is seen when it is listened to
            self.connection.send(list(references))

    def give(self, place: int, item: _Item, timeout: float | None) -> None:
        """Hands it the item of that place."""
        self.place = place
        self.deadline = float("inf") if timeout is None else time.monotonic() + timeout
        with suppress(OSError):
            self.connection.send(item)

    def end(self) -> int:
        """Kills it and all that it started; returns its exit code."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


class RewardWorkers:
    """Worker processes that have loaded the reward functions; ends them as a context manager.

    Args:
        references: import strings of the functions.
        count: processes.
        timeout: seconds for one function and one completion; None: no limit.
    """

    def __init__(self, references: Sequence[str], count: int, timeout: float | None) -> None:
        self._references = list(references)
        self._timeout = timeout
        self._workers: list[_Worker] = []
        self._count = count

    def __enter__(self) -> "RewardWorkers":
        """Starts the processes; they load the functions while other work goes on."""
        try:
            for _ in range(self._count):
                self._workers.append(_Worker(self._references))
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the processes, whatever they are at."""
        self._end_all()

    def call(
        self, rewards: Sequence[Reward], arguments: Mapping[str, list[Any]], count: int
    ) -> list[list[Outcome]]:
        """As `call_here`, but the functions run in the workers; models run here.

        Raises:
            DataError: a function did not return one score, or a worker could not load them.
        """
        functions = [reward for reward in rewards if reward.reference is not None]
        models = [reward for reward in rewards if reward.reference is None]
        items = [
            _Item(
                self._references.index(str(reward.reference)),
                reward.name,
                {name: [values[row]] for name, values in arguments.items()},
            )
            for reward in functions
            for row in range(count)
        ]
        outcomes = self._run(items)
        by_name = {
            reward.name: outcomes[i * count : (i + 1) * count] for i, reward in enumerate(functions)
        }
        by_name |= zip((m.name for m in models), call_here(models, arguments, count), strict=True)
        return [by_name[reward.name] for reward in rewards]

    def _run(self, items: Sequence[_Item]) -> list[Outcome]:
        """The outcome of every item, by whichever worker is free."""
        outcomes: dict[int, Outcome] = {}
        todo = deque(range(len(items)))
        while len(outcomes) < len(items):
            for worker in self._workers:
                if todo and worker.ready and worker.place is None:
                    place = todo.popleft()
                    worker.give(place, items[place], self._timeout)
            outcomes |= dict(self._events())
        return [outcomes[place] for place in range(len(items))]

    def _events(self) -> Iterator[tuple[int, Outcome]]:
        """Waits until something happens; what became of items."""
        limit = min(worker.deadline for worker in self._workers) - time.monotonic()
        connections = [worker.connection for worker in self._workers]
        heard = wait(connections, max(0.0, min(limit, _SECONDS_BETWEEN_LOOKS)))
        for number, worker in enumerate(self._workers):
            if worker.connection in heard:
                yield from self._listen(number, worker)
            elif worker.process.poll() is not None:
                # What the reward started may hold its end of the pipe, which then tells nothing.
                yield from self._buried(number, worker)
            elif worker.place is not None and time.monotonic() >= worker.deadline:
                place = worker.place
                self._replace(number)
                yield place, Outcome(None, f"timed out after {self._timeout:g} s")

    def _listen(self, number: int, worker: _Worker) -> Iterator[tuple[int, Outcome]]:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            yield from self._buried(number, worker)
            return
        if isinstance(message, RftError):
            raise message
        if not worker.ready:
            worker.ready = True
            return
        assert worker.place is not None
        place, worker.place, worker.deadline = worker.place, None, float("inf")
        yield place, message

    def _buried(self, number: int, worker: _Worker) -> Iterator[tuple[int, Outcome]]:
        """Another worker in the dead one's place; the item that it died of."""
        place, was_ready = worker.place, worker.ready
        code = worker.end()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if not was_ready:
            # Another would die of the same.
            raise DataError(
                f"--reward-workers: a process ended with {how} while it loaded "
                f"{', '.join(self._references)}. Its own message stands above."
            )
        self._workers[number] = _Worker(self._references)
        if place is not None:
            yield place, Outcome(None, f"the reward's process died ({how})")

    def _replace(self, number: int) -> None:
        self._workers[number].end()
        self._workers[number] = _Worker(self._references)

    def _end_all(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()


def serve(descriptor: int) -> None:
    """The life of a worker: loads the functions, then answers item after item.

    Functions run in the main thread, because many limit their time by a signal, which works there
    alone; another thread listens, and ends the process when the one that started it is gone.

    Args:
        descriptor: of its end of the pipe.
    """
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    try:
        functions = [import_callable(reference, "--reward") for reference in inbox.get()]
    except Exception as error:  # user code: anything can be raised
        connection.send(DataError(f"--reward-workers: {error}"))
        return
    connection.send("ready")
    while True:
        item = inbox.get()
        reward = Reward(item.name, functions[item.reward], 1.0)
        try:
            connection.send(call_here([reward], item.arguments, 1)[0][0])
        except RftError as error:
            connection.send(error)


def _receive(connection: Connection, inbox: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            inbox.put(connection.recv())
    finally:
        os.killpg(0, signal.SIGKILL)
