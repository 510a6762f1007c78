"""A simulated network of reliable, ordered connections, as TCP gives them: bytes are late, never lost, until a connection ends.

A one-way partition holds bytes back; if it outlasts ``USER_TIMEOUT_NS`` both ends see the connection fail. Order between
connections is free. Damage is for KV connections only: control connections trust TCP's own checksum, KV frames carry theirs.
"""

from collections import Counter, deque
from collections.abc import Callable

from relay.sim.kernel import Kernel
from relay.transfer.frame import Kind

USER_TIMEOUT_NS = 3_000_000_000  # TCP_USER_TIMEOUT and keepalive of the production sockets
CONNECT_TIMEOUT_NS = 3_000_000_000
MICROSECOND = 1_000
REPEAT_NS = 50_000_000  # within which a repeated control message comes
KIND_AT = 5  # in a KV frame: magic, version, kind


class Side:
    """One end of a connection. The owner sets ``on_data`` and ``on_close``; neither is called after ``close`` or ``on_close``."""

    def __init__(self, network: "Network", host: str, kind: str, number: int) -> None:
        self._network = network
        self.host = host
        self.kind = kind  # "agent", "engine" or "kv"
        self.number = number
        self.peer: Side
        self.open = True
        self.on_data: Callable[[bytes], None] = _nobody_listens
        self.on_close: Callable[[str], None] = _nobody_listens
        self.under_way: deque[bytes] = deque()  # to the peer
        self.ending = ""  # why no more will come after ``under_way``; empty: more may
        self.last_arrival_ns = 0
        self.held_since_ns = 0
        self.severed = False  # nothing crosses any more, and nobody has been told

    def send(self, data: bytes) -> None:
        """Queue bytes for the peer. On a connection that has ended they vanish."""
        if self.open and not self.ending:
            self._network.carry(self, data)

    def close(self) -> None:
        """What is under way still arrives, then the peer sees EOF. This side hears nothing more."""
        if self.open:
            self.open = False
            self._network.end(self, "EOF")

    def reset(self, reason: str) -> None:
        """This side fails now (its owner is told), the peer a moment later; what is under way may be lost."""
        self._network.cut(self, reason)


def _nobody_listens(argument: object) -> None:
    """Before the owner attached itself."""


class Network:
    """All hosts and connections. Delays and damage come from the tape."""

    def __init__(self, kernel: Kernel, latency_ns: int) -> None:
        self._kernel = kernel
        self._latency_ns = latency_ns
        self.damaged: Callable[[str, Side], None] = lambda kind, side: None  # a KV frame from ``side`` is, now
        self.jitter_ns = 0
        self.split_per_mille = 0
        self.damage_next_kv: Counter[str] = Counter()  # fault → KV messages it will strike
        self.forge_next_kv: list[list[str]] = []  # of each the first that can be made, see ``sim/forgery.py``
        self.repeat_next_control: dict[str, int] = {}  # host → messages of it that will come twice
        self._blocked: dict[tuple[str, str], int] = {}  # (from, to) → partitions that cover it
        self._listeners: dict[str, tuple[str, Callable[[Side], None]]] = {}
        self.sides: dict[int, Side] = {}
        self._next = 1

    def sometimes(self, name: str) -> None:
        """An interesting thing that happens on a connection."""
        self._kernel.sometimes(name)

    def handled(self) -> None:
        """An end of a connection takes a message."""
        self._kernel.events += 1

    # --- who can be reached ---------------------------------------------------------------------------------------

    def listen(self, address: str, host: str, accept: Callable[[Side], None]) -> None:
        self._listeners[address] = (host, accept)

    def unlisten(self, address: str) -> None:
        self._listeners.pop(address, None)

    def dial(self, host: str, kind: str, address: str, done: Callable[[Side | str], None]) -> None:
        """Connect; ``done`` gets this end of the connection or the reason why there is none."""
        self._kernel.after(self.delay(), self._dialled, host, kind, address, done, self._kernel.now_ns)

    def _dialled(self, host: str, kind: str, address: str, done: Callable[[Side | str], None], since_ns: int) -> None:
        target = self._listeners.get(address)
        if target is not None and (self.blocked(host, target[0]) or self.blocked(target[0], host)):
            if self._kernel.now_ns - since_ns >= CONNECT_TIMEOUT_NS:
                done(f"{address}: timed out")
                return
            self._kernel.after(CONNECT_TIMEOUT_NS // 10, self._dialled, host, kind, address, done, since_ns)
            return
        if target is None:
            done(f"{address}: connection refused")
            return
        near = Side(self, host, kind, self._next)
        far = Side(self, target[0], kind, self._next + 1)
        self._next += 2
        near.peer, far.peer = far, near
        self.sides[near.number], self.sides[far.number] = near, far
        target[1](far)
        done(near)

    # --- partitions -----------------------------------------------------------------------------------------------

    def blocked(self, source: str, target: str) -> bool:
        return self._blocked.get((source, target), 0) > 0

    def block(self, source: str, target: str) -> None:
        self._blocked[source, target] = self._blocked.get((source, target), 0) + 1

    def unblock(self, source: str, target: str) -> None:
        """Bytes held back arrive now, in order."""
        self._blocked[source, target] -= 1
        if self._blocked[source, target]:
            return
        # An end that knows already that the connection is over may still owe the other one its last bytes.
        ends = {end.number: end for side in self.sides.values() for end in (side, side.peer)}
        for side in ends.values():
            if side.host == source and side.peer.host == target and side.held_since_ns:
                side.held_since_ns = 0
                for _ in range(len(side.under_way) + bool(side.ending)):
                    self._schedule(side)

    # --- bytes ----------------------------------------------------------------------------------------------------

    def delay(self) -> int:
        if not self.jitter_ns:
            return self._latency_ns
        return self._latency_ns + self._kernel.tape.below(self.jitter_ns // MICROSECOND, "jitter us") * MICROSECOND

    def carry(self, side: Side, data: bytes) -> None:
        tape = self._kernel.tape
        if side.severed:
            return
        if side.kind in ("agent", "engine") and self.repeat_next_control.get(side.host):
            self.repeat_next_control[side.host] -= 1
            self._kernel.after(
                tape.below(REPEAT_NS // MICROSECOND, "repeat us") * MICROSECOND, self._repeat, side, data
            )
        if side.kind == "kv":
            whole = data[KIND_AT] == Kind.KV
            if whole and self._strikes(
                "kv_lose", side
            ):  # not TCP's doing; what must not be trusted is that all frames came
                return
            if whole and self._strikes("kv_repeat", side):
                self._put(side, data)
            elif self._strikes("kv_corrupt", side):
                at = tape.below(len(data), "corrupt at")
                data = data[:at] + bytes([data[at] ^ (1 << tape.below(8, "corrupt bit"))]) + data[at + 1 :]
            elif self._strikes("kv_truncate", side):
                data = data[: tape.below(len(data), "truncate at")]
                if data:
                    self._put(side, data)
                self.end(side, "EOF")
                return
        if self.split_per_mille and len(data) > 1 and tape.chance(self.split_per_mille, "split"):
            at = 1 + tape.below(len(data) - 1, "split at")
            self._put(side, data[:at])
            data = data[at:]
        self._put(side, data)

    def _repeat(self, side: Side, data: bytes) -> None:
        if side.open and not side.ending and not side.severed:
            self._kernel.sometimes("control message repeated")
            self._put(side, data)

    def sever(self, side: Side) -> int:
        """The connection is dead on its way. Each end is told when its own time-out is over; returns when both are, from now."""
        told_ns = 0
        for end in (side, side.peer):
            if not end.severed:
                end.severed = True
                end.under_way.clear()
                after_ns = USER_TIMEOUT_NS + self._kernel.tape.below(1000, "keepalive ms") * 1000 * MICROSECOND
                self._kernel.after(after_ns, self._closed, end, "timed out")
                told_ns = max(told_ns, after_ns)
        return told_ns

    def tell(self, side: Side) -> None:
        """Both ends of a severed connection find out now."""
        for end in (side, side.peer):
            self._closed(end, "timed out")

    def _strikes(self, fault: str, side: Side) -> bool:
        """Whether ``fault`` waits for a message of KV connections; this one is it, then."""
        if not self.damage_next_kv[fault]:
            return False
        self.damage_next_kv[fault] -= 1
        self.damaged(fault, side)
        self._kernel.sometimes(f"kv frame: {fault}")
        return True

    def _put(self, side: Side, data: bytes) -> None:
        side.under_way.append(data)
        self._schedule(side)

    def _schedule(self, side: Side) -> None:
        side.last_arrival_ns = max(side.last_arrival_ns, self._kernel.now_ns + self.delay())
        self._kernel.at(side.last_arrival_ns, self.arrive, side)

    def arrive(self, side: Side) -> None:
        """The oldest bytes from ``side`` (or its end) reach the peer."""
        if side.severed or (not side.under_way and not side.ending):
            return
        if self.blocked(side.host, side.peer.host):
            if not side.held_since_ns:
                side.held_since_ns = self._kernel.now_ns
                self._kernel.after(USER_TIMEOUT_NS, self.give_up, side, side.held_since_ns)
            return
        peer = side.peer
        if side.under_way:
            data = side.under_way.popleft()
            if peer.open:
                self._kernel.witness(data)
                peer.on_data(data)
        elif side.ending:
            self._closed(peer, side.ending)

    def end(self, side: Side, reason: str) -> None:
        """Nothing follows what ``side`` has under way."""
        if not side.ending:
            side.ending = reason
            if not side.severed:
                self._schedule(side)

    def cut(self, side: Side, reason: str) -> None:
        """The connection fails: a part of what is under way still arrives, the rest is lost, both ends are told."""
        if side.severed:
            return
        for end in (side, side.peer):
            keep = self._kernel.tape.below(len(end.under_way) + 1, "cut after")
            while len(end.under_way) > keep:
                lost = end.under_way.pop()
            if keep < len(end.under_way) + 1 and keep and len(end.under_way[-1]) > 1:
                lost = end.under_way.pop()
                end.under_way.append(lost[: 1 + self._kernel.tape.below(len(lost) - 1, "cut at")])
            if not end.ending:
                end.ending = reason
                self._schedule(end)

    def give_up(self, side: Side, since_ns: int) -> None:
        """Bytes of ``side`` were held back too long: both ends see a time-out."""
        if side.held_since_ns != since_ns or side.severed:
            return
        side.under_way.clear()
        side.peer.under_way.clear()
        for end in (side, side.peer):
            end.ending = end.ending or "timed out"
            end.held_since_ns = 0
            self._kernel.after(self.delay(), self._closed, end, "timed out")

    def _closed(self, side: Side, reason: str) -> None:
        """``side`` learns that the connection is over."""
        was_open, side.open = side.open, False
        self.sides.pop(side.number, None)
        if not side.ending:
            self.end(side, "EOF")
        if was_open:
            side.on_close(reason)

    def sides_of(self, host: str) -> list[Side]:
        """Open sides at ``host`` of all its connections."""
        return [side for side in self.sides.values() if side.host == host and side.open]

    def connections_of(self, host: str, kind: str) -> list[Side]:
        """Open sides at ``host`` of connections of one kind."""
        return [side for side in self.sides.values() if side.host == host and side.kind == kind and side.open]
