"""Bugs in the worker's core and in both ends of a KV transfer."""

from typing import Any

from msgspec import structs
from msgspec.structs import replace

from relay.sim import kv_link
from relay.sim.planted.mutant import Mutant, nothing
from relay.transfer.receiver import Receiver
from relay.transfer.sender import Sender
from relay.transfer.watchdog import Watchdog
from relay.worker import core
from relay.worker.announce import Announcer
from relay.worker.core import WorkerCore
from relay.worker.table import HeldTable


def _forgets_nothing(original: Any) -> Any:
    """A prompt that lost its blocks goes on as if it had them."""
    return lambda announcer, released: []


def _never_acknowledge(original: Any) -> Any:
    def send_ended(core: WorkerCore, transfer: int) -> None:
        return None

    return send_ended


def _old_attempt_wins(original: Any) -> Any:
    """A worker that holds an older attempt refuses the newer one."""

    def attempt(table: HeldTable, request: int, choice: int) -> Any:
        held = original(table, request, choice)
        return held if held is None or held.key.attempt > 1 else None

    return attempt


def _skips_a_layer(original: Any) -> Any:
    """The last layer of a prompt's last chunk is not sent, and D does not count layers."""
    return property(lambda receiver: receiver._layers_missing < receiver.layout.num_layers)


def _any_head(original: Any) -> Any:
    """D counts layers and tokens; a frame with some of their heads will do."""

    def written(receiver: Receiver, header: Any, now_ns: int) -> None:
        original(receiver, replace(header, first_head=0, head_count=receiver.layout.num_kv_heads), now_ns)

    return written


def _sends_unwritten(original: Any) -> Any:
    """All layers count as written when the first one is."""

    def written(sender: Sender, layer: int, first: int, count: int) -> None:
        if layer == 0:
            for each in range(sender.layout.num_layers):
                original(sender, each, first, count)

    return written


def _epoch_ignored(original: Any) -> Any:
    def hear(receiver: Receiver, header: Any, now_ns: int) -> bool:
        mine = {"epoch": receiver.order.source_incarnation}
        return bool(original(receiver, replace(header, **mine), now_ns))

    return hear


def _attempt_ignored(original: Any) -> Any:
    def hear(receiver: Receiver, header: Any, now_ns: int) -> bool:
        return bool(original(receiver, replace(header, attempt=receiver.order.attempt), now_ns))

    return hear


def _handoff_is_enough(original: Any) -> Any:
    return property(lambda receiver: True)


def _any_end(original: Any) -> Any:
    """Where a range of KV ends is not looked at."""

    def admit(receiver: Receiver, header: Any, now_ns: int) -> bool:
        order = receiver.order
        if header.first_token + header.token_count > order.num_tokens:
            return receiver._hear(header, now_ns)
        return bool(original(receiver, header, now_ns))

    return admit


def _no_window(original: Any) -> Any:
    """What is on its way does not count."""

    def next_kv(sender: Sender) -> Any:
        kept, sender._bytes_credited = sender._bytes_credited, sender.bytes_sent
        frame = original(sender)
        sender._bytes_credited = kept
        return frame

    return next_kv


def _takes_while_draining(original: Any) -> Any:
    def take(core: WorkerCore, gateway: int, order: Any, key: Any) -> None:
        kept, core._draining = core._draining, False
        original(core, gateway, order, key)
        core._draining = kept

    return take


def _refusals_forgotten(original: Any) -> Any:
    """An order that was refused and comes a second time is taken, if there is room then."""

    def refuse(core: WorkerCore, gateway: int, work: Any, reason: Any) -> None:
        original(core, gateway, work, reason)
        core.held._ended.pop((work.request, work.choice), None)

    return refuse


def _peer_is_quoted(original: Any) -> Any:
    """Why the other end gave the transfer up is told as if it were this engine's own reason."""

    def failed(core: WorkerCore, transfer: int, reason: str, *, quietly: bool) -> None:
        held = core.held.by_transfer.get(transfer)
        if held is not None and not quietly:
            core._custody.fail(held, reason, retry=True)
        else:
            original(core, transfer, reason, quietly=quietly)

    return failed


def _drains_at_once(original: Any) -> Any:
    """SIGTERM ends the engine whatever it holds."""

    def drain(core: WorkerCore, now_ns: int) -> None:
        original(core, now_ns)
        core._exit(0, "drained")

    return drain


def _handoff_without_cached(original: Any) -> Any:
    """D cannot say how much of the prompt P had in its cache."""

    return lambda update: structs.replace(original(update), cached_tokens=0)


def _any_hello(original: Any) -> Any:
    return lambda ours, theirs: ""


TABLE = (
    Mutant("a handoff does not tell of the cache", "I4", core, "handoff_of", _handoff_without_cached),
    Mutant("partial coverage accepted", "I7", Receiver, "covered", _handoff_is_enough),
    Mutant("a layer short accepted", "I7", Receiver, "covered", _skips_a_layer),
    Mutant("coverage ignores heads", "I7", Receiver, "written", _any_head),
    Mutant("layers sent before they are written", "I7", Sender, "written", _sends_unwritten),
    Mutant("KV above the end accepted", "I7", Receiver, "admit", _any_end),
    Mutant("checksums not verified", "I7", kv_link, "verify", nothing),
    Mutant("preempted prompts not announced anew", "I7", Announcer, "preempted", _forgets_nothing),
    Mutant("stale epoch accepted", "I18", Receiver, "_hear", _epoch_ignored),
    Mutant("stale attempt accepted", "I18", Receiver, "_hear", _attempt_ignored),
    Mutant("acknowledged blocks are kept", "I8", WorkerCore, "_send_ended", _never_acknowledge),
    Mutant("first attempts are not superseded", "I5", HeldTable, "attempt", _old_attempt_wins),
    Mutant("a window without a bound", "I10", Sender, "_next_kv", _no_window),
    Mutant("KV crosses between unequal numerics", "I13", kv_link, "mismatch", _any_hello),
    Mutant("work taken while draining", "I17", WorkerCore, "_take", _takes_while_draining),
    Mutant("a refused order is taken when it comes again", "I8", WorkerCore, "_refuse", _refusals_forgotten),
    Mutant("a peer's drain is told as its own", "I17", WorkerCore, "_transfer_failed", _peer_is_quoted),
    Mutant("a drain loses what is held", "I17", WorkerCore, "_drain", _drains_at_once),
    Mutant("a drain never ends", "I17", WorkerCore, "_hand_back_all", nothing),
    Mutant("leases are not renewed", "core", Watchdog, "heard", nothing),
    Mutant("leases never expire on P", "detection", Sender, "tick", nothing),
    Mutant("leases never expire on D", "detection", Receiver, "tick", nothing),
)
