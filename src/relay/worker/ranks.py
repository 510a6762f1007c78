"""Starting the other ranks of a worker and watching them: one dead rank ends the worker, as its end ends them."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading

from relay.errors import DeviceLostError
from relay.kernels.ranks.backend import RankedBackend
from relay.kernels.ranks.exchange import MeetingPlace
from relay.models.config import ModelConfig
from relay.models.pack import Pack
from relay.worker.device import rank_share
from relay.worker.spec import WorkerSpec, encode_spec

END_S = 5.0


def exchange_floats(spec: WorkerSpec, config: ModelConfig) -> int:
    """The most that one rank brings to a meeting: partial sums of a whole step, or its part of the logits."""
    return max(spec.max_num_batched_tokens * config.hidden, spec.max_num_seqs * config.vocab)


def start_ranks(spec: WorkerSpec) -> RankedBackend:
    """Rank 0's backend. The others start to load at once. Call from a thread that lives as long as the process: they end with it.

    Raises what ``Pack`` raises.
    """
    from pathlib import Path

    place = MeetingPlace.create(spec.ranks, exchange_floats(spec, Pack(Path(spec.pack_path)).config))
    pool_memory = os.memfd_create("relay-rank-kv")
    links, processes = [], []
    for rank in range(1, spec.ranks):
        ours, theirs = socket.socketpair()
        processes.append(_start(spec, rank, place, pool_memory, theirs))
        theirs.close()
        links.append(ours)
    share = rank_share(spec, 0, place)
    watch = RankProcesses(processes, links, place, pool_memory)
    kind = RankedBackend
    if spec.backend == "cuda":
        from relay.kernels.cuda.ranked_backend import RankedCudaBackend

        kind = RankedCudaBackend
    return kind(share, links, pool_memory, watch)


def _start(
    spec: WorkerSpec, rank: int, place: MeetingPlace, pool_memory: int, link: socket.socket
) -> "subprocess.Popen[bytes]":
    arguments = ["--spec", encode_spec(spec), "--rank", str(rank), "--parent", str(os.getpid())]
    arguments += ["--link", str(link.fileno()), "--pool", str(pool_memory), "--floats", str(place.floats)]
    arguments += ["--place", ",".join(map(str, place.descriptors))]
    return subprocess.Popen(
        [sys.executable, "-m", "relay.worker.rank_process", *arguments],
        pass_fds=(link.fileno(), pool_memory, *place.descriptors),
        stdin=subprocess.DEVNULL,
    )


class RankProcesses:
    """Once started, a thread ends this process when a rank has ended."""

    def __init__(
        self,
        processes: "list[subprocess.Popen[bytes]]",
        links: list[socket.socket],
        place: MeetingPlace,
        pool_memory: int,
    ) -> None:
        self._processes, self._links, self._place, self._pool_memory = processes, links, place, pool_memory
        self._pidfds = [os.pidfd_open(process.pid) for process in processes]
        self._wakeup = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        ready, _, _ = select.select([*self._pidfds, self._wakeup], [], [])
        if self._wakeup in ready:
            return
        rank = self._pidfds.index(ready[0])
        code = self._processes[rank].wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        text = f"rank {rank + 1} of this worker ended {how}; the worker ends"
        if code < 0:
            # The same way, so that what is said of it is true: a killed rank is nobody's fault, a crashed one may be a request's.
            print(text, file=sys.stderr, flush=True)
            signal.raise_signal(-code)  # in this thread: one to the process may come later
        raise DeviceLostError(text)

    def await_end(self) -> None:
        if self._thread.is_alive():
            self._thread.join(END_S)

    def stop(self) -> None:
        """Their links are closed, which ends them; what does not end is killed."""
        os.eventfd_write(self._wakeup, 1)
        if self._thread.is_alive():
            self._thread.join()
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._place.close()
        for descriptor in (*self._pidfds, self._wakeup, self._pool_memory):
            os.close(descriptor)
