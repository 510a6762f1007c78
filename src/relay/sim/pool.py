"""Runs of many tapes on several cores: child processes that take one order a line and answer with one line.

Each child is ``python -m relay.sim.pool``; orders and answers are JSON of fixed types. A child ends when its input
does, so none outlives the process that started it.
"""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import msgspec

from relay.sim.run import Run, run_tape
from relay.sim.tape import Edits, Tape

COLLECT_EVERY = 16  # runs: collecting cycles within a run costs a twentieth of it


class Order(msgspec.Struct, frozen=True):
    """One run."""

    seed: int
    edits: Edits = Edits()
    mutant: str = ""


class Runner:
    """Does orders in this process."""

    def __init__(self) -> None:
        self._runs = 0
        gc.collect()
        gc.freeze()
        gc.disable()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        gc.enable()

    def run(self, order: Order) -> Run:
        with _planted(order.mutant):
            run = run_tape(Tape(order.seed, order.edits, mutant=order.mutant))
        self._runs += 1
        if self._runs % COLLECT_EVERY == 0:
            gc.collect()
        return run


def _planted(mutant: str) -> AbstractContextManager[None]:
    if not mutant:
        return nullcontext()
    from relay.sim.mutants import by_name, planted

    return planted(by_name(mutant))


class Pool:
    """``jobs`` processes. ``each`` does orders in any order of time; ``done`` is never called by two threads at once."""

    def __init__(self, jobs: int) -> None:
        self._children = [
            subprocess.Popen(  # a process group each: Ctrl-C is for the parent, which ends them
                [sys.executable, "-m", "relay.sim.pool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
            )
            for _ in range(jobs)
        ]
        self._lock = threading.Lock()
        self._problem: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.close()
            if error[0] is not None:
                child.kill()
            child.wait()
            child.stdout.close()

    def each(self, orders: Iterator[Order], done: Callable[[Order, Run], None]) -> None:
        """Take orders until there is none left; returns when all are done. Raises what ``orders`` or ``done`` raised."""
        threads = [threading.Thread(target=self._serve, args=(child, orders, done)) for child in self._children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._problem is not None:
            raise self._problem

    def _serve(
        self, child: subprocess.Popen[bytes], orders: Iterator[Order], done: Callable[[Order, Run], None]
    ) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            while self._problem is None:
                with self._lock:
                    order = next(orders, None)
                if order is None:
                    return
                child.stdin.write(msgspec.json.encode(order) + b"\n")
                child.stdin.flush()
                line = child.stdout.readline()
                if not line:
                    raise AssertionError(f"a process of the sweep died at seed {order.seed}")
                run = msgspec.json.decode(line, type=Run)
                with self._lock:
                    done(order, run)
        except BaseException as error:  # handed to the caller of ``each``
            self._problem = error


def main() -> None:
    """A child: orders on stdin, runs on stdout."""
    with Runner() as runner:
        for line in sys.stdin.buffer:
            run = runner.run(msgspec.json.decode(line, type=Order))
            sys.stdout.buffer.write(msgspec.json.encode(run) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
