"""CPU time of one token event in the gateway's core and shell: 256 running sequences, one Tokens message a step.

    python -m benchmarks.gateway_core [--json FILE]

``core`` is ``GatewayCore.handle`` alone; ``shell`` feeds the encoded frame to a connection's ``data_received`` and ends in a sink
that counts (decode, core, dispatch). Medians over rounds of at least 200 steps each, process CPU time.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report import provenance
from relay.control.commands import Deliver
from relay.control.connection import Connection
from relay.control.contract import Delivery, ModelInfo, RequestFailure, Submission
from relay.control.core import GatewayCore
from relay.control.events import RequestSubmitted, Started, WorkerConnected, WorkerMessage
from relay.control.shell import GatewayShell
from relay.control_config import ControlConfig
from relay.ids import WorkerKey
from relay.protocol.framing import encode
from relay.protocol.messages import Hello, Role, TokenEntry, Tokens
from relay.protocol.sampling import SamplingParams

STREAMS = 256
STEPS = 200
ROUNDS = 9
MODEL = ModelInfo("bench", "digest", "numerics", 50_000, 1 << 20, 0, (0,))
KEY = WorkerKey("worker-0", 1)


class CountingSink:
    count = 0

    def tokens(self, delivery: Delivery) -> None:
        CountingSink.count += len(delivery.token_ids)

    def failed(self, failure: RequestFailure) -> None:
        raise AssertionError(failure.message)


class NoLauncher:
    def start(self, worker: WorkerKey, role: Role) -> None:
        return

    def leaving(self, workers, *, stay_out: bool) -> None:
        """Nobody else starts workers."""

    def stop(self, worker: WorkerKey, *, kill: bool) -> None:
        return


def hello(process: str) -> Hello:
    return Hello(
        process=process,  # type: ignore[arg-type]
        worker=KEY.worker,
        incarnation=1,
        pid=1,
        model_digest="digest",
        numerics_id="numerics",
        kv_blocks=1 << 20,
        max_num_seqs=STREAMS,
    )


def step(position: int, requests: Iterable[int]) -> Tokens:
    return Tokens([TokenEntry(request, 0, 1, position, [position % 50_000]) for request in requests])


def submission() -> Submission:
    return Submission(list(range(32)), SamplingParams(max_tokens=1 << 19, seed=1))


def measure_core() -> list[float]:
    """Seconds a token event, one value a round."""
    core = GatewayCore(ControlConfig(), MODEL, [("worker-0", "both")])
    core.handle(Started(), 0)
    core.handle(WorkerConnected(1, hello("agent")), 0)
    core.handle(WorkerConnected(2, hello("engine")), 0)
    requests = range(1, STREAMS + 1)
    for request in requests:
        core.handle(RequestSubmitted(request, submission()), 0)
    rounds, position = [], 0
    for _ in range(ROUNDS):
        events = [WorkerMessage(KEY, step(position + index, requests)) for index in range(STEPS)]
        position += STEPS
        start = time.process_time()
        for event in events:
            commands = core.handle(event, 0)
        rounds.append((time.process_time() - start) / STEPS / STREAMS)
        assert len(commands) == STREAMS
        assert isinstance(commands[-1], Deliver)
    return rounds


async def measure_shell() -> list[float]:
    """The same from the frame's bytes to the sink."""
    shell = GatewayShell(GatewayCore(ControlConfig(), MODEL, [("worker-0", "both")]), NoLauncher())
    shell.start()
    connections = []
    for number, process in ((1, "agent"), (2, "engine")):
        connection = Connection(shell, number)
        shell._connections[number] = connection
        shell.hello(connection, hello(process))
        connections.append(connection)
    engine = connections[1]
    requests = [shell.submit(submission(), CountingSink()) for _ in range(STREAMS)]
    rounds, position = [], 0
    for _ in range(ROUNDS):
        frames = [encode(step(position + index, requests)) for index in range(STEPS)]
        position += STEPS
        before = CountingSink.count
        start = time.process_time()
        for frame in frames:
            engine.data_received(frame)
        rounds.append((time.process_time() - start) / STEPS / STREAMS)
        assert CountingSink.count - before == STEPS * STREAMS
    await shell.close()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    core, shell = measure_core(), asyncio.run(measure_shell())
    result = {
        **provenance(),
        "streams": STREAMS,
        "core_us_per_token": round(statistics.median(core) * 1e6, 3),
        "core_and_shell_us_per_token": round(statistics.median(shell) * 1e6, 3),
        "rounds_us": {"core": [round(x * 1e6, 3) for x in core], "shell": [round(x * 1e6, 3) for x in shell]},
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
