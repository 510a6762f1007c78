"""Scenarios about KV on its way from P to D."""

from dataclasses import replace

from relay.control_config import BreakerConfig
from relay.sim.backend import HALVES
from relay.sim.clients import Client
from relay.sim.engine import TICK_NS
from relay.sim.forgery import FORGERIES
from relay.sim.gateway import HOST
from relay.sim.scenarios.stage import Scenario, Stage, cluster, control, scheduler
from relay.sim.seldom import BLOCK_ADOPTED
from relay.sim.swarm import MS
from relay.worker.core import WorkerConfig
from relay.worker.held import HeldState


def _streaming(stage: Stage, worker: str, frames: int = 2) -> bool:
    """``worker`` has received a part of some prompt's KV."""
    node = stage.node(worker)
    return node.running is not None and any(
        receiver.bytes_copied >= frames * 64 and not receiver.over for receiver in node.running.transport.receivers()
    )


def _reserved(stage: Stage, client: Client) -> bool:
    return any(stage.holds(worker, client, HeldState.RESERVED) for worker in stage.world.workers)


def _partial_kv(stage: Stage) -> None:
    for salt, blow in enumerate(("kill P", "cut", "truncate", "corrupt", "lose", "abort")):
        client = stage.submit(prompt=80, max_tokens=6, salt=salt)
        stage.until(lambda: _streaming(stage, "decode-0"), "D receives KV")
        attempt = stage.attempts(client)
        if blow == "kill P":
            stage.kill("prefill-0")
        elif blow == "cut":
            stage.fault("cut_kv", "decode-0")
            stage.world.harm("prefill-0", "cut_kv")
            stage.world.network.connections_of("decode-0", "kv")[0].reset("connection reset")
        elif blow == "truncate":
            stage.fault("kv_truncate", "decode-0")
            stage.world.network.damage_next_kv["kv_truncate"] += 1
        elif blow == "corrupt":
            stage.fault("kv_corrupt", "decode-0")
            stage.world.network.damage_next_kv["kv_corrupt"] += 1
        elif blow == "lose":
            stage.fault("kv_lose", "decode-0")
            stage.world.network.damage_next_kv["kv_lose"] += 1
        else:
            stage.disconnect(client)
            stage.until(stage.all_idle, "every worker is free again", 1000)
            continue
        stage.finish(client)
        stage.world.network.damage_next_kv.clear()
        again = f"attempt {attempt + 1}:" in stage.story(client)
        stage.require(again, f"{blow}: attempt {attempt} went on from a part of its KV")
        stage.until(lambda: stage.ready("prefill-0") and stage.all_idle(), "P is back")


def _malformed_kv(stage: Stage) -> None:
    for salt, way in enumerate(FORGERIES):
        stage.finish(stage.submit(prompt=48, max_tokens=1, shared=48))  # what D has of this need not be sent
        client = stage.submit(prompt=90, max_tokens=6, salt=salt, shared=48)
        stage.until(lambda: _streaming(stage, "decode-0"), "D receives KV")
        stage.fault("kv_forge", "decode-0")
        stage.world.network.forge_next_kv.append([way])
        stage.until(lambda: not stage.world.network.forge_next_kv, f"P sends {way}")
        stage.finish(client)
        stage.require("malformed KV frame" in stage.story(client), f"{way}: D did not give the transfer up")
    stage.require(not stage.counter("workers_lost"), "a worker was lost because of a malformed frame")


def _computed_meanwhile(stage: Stage) -> None:
    for salt in range(3):
        first = stage.submit(prompt=100, max_tokens=4, salt=salt)
        stage.until(lambda: _streaming(stage, "decode-0", 25), "D has received a half of the KV")
        stage.terminate("prefill-0")  # it sends what it has begun, but takes nothing more
        stage.finish(first, stage.submit(prompt=100, max_tokens=4, salt=salt, gateway="gateway-1"))
        stage.until(lambda: stage.ready("prefill-0") and stage.all_idle(), "P is back")
    stage.require(stage.kernel.counts[BLOCK_ADOPTED] > 0, "no block came while another sequence was to compute it")


def _stranded_lease(stage: Stage) -> None:
    # D dies when it has all of the KV and P waits for its word.
    client = stage.submit(prompt=80, max_tokens=12, salt=1)
    stage.until(lambda: stage.holds("prefill-0", client, HeldState.HANDED_OFF), "P has handed off")
    stage.kill(stage.decode_of(client))
    stage.until(lambda: stage.idle("prefill-0") or stage.prefill_of(client) == "prefill-0", "P is told", 50)
    stage.finish(client)
    stage.until(stage.all_idle, "nothing is kept", 1000)
    # D has it all and goes on, but its word is held back by the network: P may keep the KV for a lease and no longer.
    client = stage.submit(prompt=80, max_tokens=12, salt=2)
    stage.until(lambda: stage.holds("prefill-0", client, HeldState.HANDED_OFF), "P has handed off")
    mend = stage.partition((stage.decode_of(client), "prefill-0"))
    lease_ms = (stage.world.swarm.transfer.lease_ns + 2 * TICK_NS) // MS
    stage.until(lambda: stage.idle("prefill-0"), "P gives up on D", lease_ms)
    stage.finish(client)
    mend()
    # Neither P nor the gateway can reach D in the middle of a transfer: D frees the blocks after its own lease.
    client = stage.submit(prompt=80, max_tokens=12, salt=3)
    decode = stage.decode_of(client)
    stage.until(lambda: _streaming(stage, decode), "D receives KV")
    mend = stage.partition(("prefill-0", decode), (decode, "prefill-0"), ("gateway", decode))
    stage.until(lambda: stage.idle(decode), "D gives up on P", lease_ms)
    mend()
    stage.finish(client)


def _late_writes(stage: Stage) -> None:
    for salt in range(12):
        first = stage.submit(prompt=80, max_tokens=4, salt=2 * salt)
        stage.until(lambda: _streaming(stage, "decode-0", 1), "D receives KV")
        stage.world.network.jitter_ns = 20 * MS  # what is under way arrives when the blocks are somebody else's
        stage.fault("jitter", "")
        stage.disconnect(first)
        second = stage.submit(prompt=80, max_tokens=4, salt=2 * salt + 1)
        stage.until(lambda: _reserved(stage, second), "the blocks are taken again")  # noqa: B023 - called at once
        stage.world.network.jitter_ns = 0
        stage.world.harm("", "jitter ends")
        stage.finish(second)


def _long_queue(stage: Stage) -> None:
    clients = [stage.submit(prompt=80, max_tokens=4, salt=salt) for salt in range(6)]
    stage.until(lambda: all(_reserved(stage, client) for client in clients), "D has made room for all")
    begin_ns = stage.kernel.now_ns
    stage.finish(*clients)
    waited_ns = stage.kernel.now_ns - begin_ns
    stage.require(
        waited_ns > 2 * stage.world.swarm.transfer.lease_ns, "no prompt waited for long: the scenario is too easy"
    )
    stage.require(not stage.counter("resumed"), "a transfer was given up although both of its ends were there")


def _decode_out_of_memory(stage: Stage) -> None:
    clients = [stage.submit(prompt=30, max_tokens=50, salt=salt) for salt in range(8)]
    stage.until(lambda: stage.engine("decode-0").scheduler.load().running > 1, "D decodes")
    for _ in range(3):
        stage.fault("step_error", "decode-0")
        stage.world.step_errors += 1
        stage.engine("decode-0").fail_rows = 2  # the step as a whole runs out of memory, each row alone does not
        stage.wait(30)
    stage.finish(*clients, within_ms=60_000)
    preemptions = stage.engine("decode-0").scheduler.load().counters["preemptions"]
    stage.require(preemptions > 0, "the pool never ran short: the scenario is too easy")


def _refusals(stage: Stage) -> None:
    clients = [stage.submit(prompt=40, max_tokens=20, salt=salt) for salt in range(24)]
    stage.finish(*clients, within_ms=60_000)
    refused, seconds = stage.counter("refused_full"), stage.kernel.now_ns / 1e9
    stage.require(refused > 0, "nobody was refused: the scenario is too easy")
    stage.require(
        refused <= 24 * 20, f"{refused} refusals of 24 requests in {seconds:.1f} s: the gateway asks in circles"
    )


def _refused_and_again(stage: Stage) -> None:
    for salt in range(6):
        first = stage.submit(prompt=24, max_tokens=3, salt=2 * salt)
        stage.until(lambda: bool(first.tokens[0]), "the worker is full")  # noqa: B023 - called at once
        stage.world.network.repeat_next_control[HOST] = 1
        refused = stage.counter("refused_full")
        second = stage.submit(prompt=24, max_tokens=80, salt=2 * salt + 1)
        stage.until(lambda: stage.counter("refused_full") > refused, "the second one is refused")  # noqa: B023
        stage.disconnect(second)
        stage.finish(first)
        stage.wait(160)  # the order comes again, and what it began would be noticed
        stage.require(stage.all_idle(), "an order is carried out that nobody wants")


def _crosswise(stage: Stage) -> None:
    gateways = stage.world.gateways.values()
    stage.until(lambda: all(len(node.core.state.ready_workers()) == 2 for node in gateways), "both see both workers")
    busy = [stage.submit(prompt=40, max_tokens=40, salt=salt, gateway="gateway-0") for salt in range(2)]
    stage.until(lambda: stage.engine("decode-0").scheduler.load().running == 2, "D is full")
    mine = [stage.submit(prompt=40, max_tokens=4, salt=salt, gateway="gateway-1") for salt in range(10, 16)]
    stage.until(lambda: bool(stage.world.gateways["gateway-1"].core.state.parked), "P keeps KV for the room on D")
    theirs = [stage.submit(prompt=40, max_tokens=4, salt=salt, gateway="gateway-0") for salt in range(20, 26)]
    begin_ns = stage.kernel.now_ns
    stage.finish(*busy, *mine, *theirs)
    waited_ms = (stage.kernel.now_ns - begin_ns) // MS
    refused = sum(node.core.state.counters["refused_full"] for node in gateways)
    stage.require(refused > 0, "nobody was refused: the scenario is too easy")
    stage.require(refused <= 14 * 5, f"{refused} refusals of 14 requests in {waited_ms} ms: they ask in circles")
    stage.require(waited_ms < 5000, f"{waited_ms} ms for 14 short requests: each waits for what the other keeps")


SCENARIOS = (
    Scenario(
        "partial-kv",
        "SGLang (issue 30233): when prefill was aborted, decode went on from the KV that had come and produced garbage",
        "while D receives KV: P is killed, the connection cut, a frame truncated, a bit flipped, a frame lost, the client gone; "
        "D never computes from what came, and the request is answered by another attempt",
        cluster(1, 1, kv_parts=HALVES),
        _partial_kv,
    ),
    Scenario(
        "malformed-kv",
        "the fault matrix of this project: a P with a bug, or one that lies, says where D shall write",
        "P names a layer, heads, tokens or a size that D has made no room for, one after another: D stores none and asks anew",
        cluster(1, 1, control=replace(control(), breaker=BreakerConfig(min_failures=20))),
        _malformed_kv,
    ),
    Scenario(
        "computed-meanwhile",
        "the fault matrix of this project: a block is computed, or received, for one sequence while another one is half-way there",
        "for one gateway D computes in small chunks what P is just sending it for another: it goes on behind the blocks that came",
        cluster(
            1, 1, scheduler=scheduler(max_num_batched_tokens=16), gateways=("gateway-0", "gateway-1"), step_ns=8 * MS
        ),
        _computed_meanwhile,
    ),
    Scenario(
        "stranded-kv-lease",
        "vLLM: when decode died, prefill kept the KV made for it for 480 s, and its pool filled up",
        "D dies after the handoff; its acknowledgement is held back; nobody reaches it: P and D free at once, or after a lease",
        cluster(1, 2),
        _stranded_lease,
    ),
    Scenario(
        "long-prefill-queue",
        "the fault matrix of this project: a transfer whose prompt waits for its turn looks like one whose peer is gone",
        "D has made room for six prompts and P computes them one by one, for several leases: no transfer is given up",
        cluster(1, 1, scheduler=scheduler(max_num_batched_tokens=16), step_ns=60 * MS),
        _long_queue,
    ),
    Scenario(
        "late-kv-writes",
        "the fault matrix of this project: KV of a cancelled request arrives when its blocks belong to the next one",
        "requests are cancelled while their KV is under way through a slow network; the next ones get the same blocks",
        cluster(1, 1, scheduler=scheduler(num_blocks=7)),
        _late_writes,
    ),
    Scenario(
        "decode-oom",
        "SGLang (issue 6857): decode ran out of memory in the disaggregated shape and hung for ever",
        "D's pool holds half of what its requests grow to, and steps of several rows fail besides: all are answered",
        cluster(1, 1, scheduler=scheduler(num_blocks=8, growth_tokens=0)),
        _decode_out_of_memory,
    ),
    Scenario(
        "refusal-storm",
        "SGLang gateway and peers: retries of refused work are themselves the load that makes workers refuse",
        "24 requests for two decode workers that hold two each: all are answered, with few refusals",
        cluster(1, 2, worker=WorkerConfig(report_interval_ns=10 * MS, max_held=2)),
        _refusals,
    ),
    Scenario(
        "refused-and-again",
        "the fault matrix of this project: an order that was refused came a second time when there was room, and was taken",
        "a full worker refuses, its client leaves, and the same order comes again when the worker is free: nothing is computed",
        cluster(0, 1, worker=WorkerConfig(report_interval_ns=10 * MS, max_held=1)),
        _refused_and_again,
    ),
    Scenario(
        "crosswise",
        "the fault matrix of this project: two who share two pools each hold one and wait for the other, and ask without end",
        "P's places are prompts that one gateway parked for room on D, D's room is held for another one's prompts: all are "
        "answered soon, with few refusals",
        cluster(
            1,
            1,
            worker=WorkerConfig(report_interval_ns=10 * MS, max_held=3),
            scheduler=scheduler(max_num_seqs=2),
            gateways=("gateway-0", "gateway-1"),
            step_ns=8 * MS,
        ),
        _crosswise,
    ),
)
