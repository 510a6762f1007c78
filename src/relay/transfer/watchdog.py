"""Silence and standstill of one transfer, seen from one end; pure, time is an argument.

A peer can be gone in two ways. It says nothing at all: *silence*. Or it answers every probe and yet no byte moves, because the bulk
connection is stuck while another one works, or because whoever copies there is: *standstill*. Either is asked about after
``probe_ns`` and ends the transfer after its own bound; nobody is silent who was not asked and given time, however late we look
(a timer that slept is our own stall). A transfer with nothing under way cannot stand still: a prompt
may wait in P's queue for as long as it likes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is due now: a probe, or the end for ``reason``."""

    probe: bool = False
    reason: str = ""


QUIET = Verdict()


class Watchdog:
    """Tell it what was heard and how many bytes have arrived; ask it what is due."""

    def __init__(self, probe_ns: int, stall_ns: int, now_ns: int) -> None:
        self._probe_ns = probe_ns
        self._stall_ns = stall_ns
        self.heard_ns = now_ns
        self._moved_ns = now_ns
        self._probed_ns = now_ns
        self._arrived = 0

    def restart(self, now_ns: int) -> None:
        """The connection is there: nothing before counts."""
        self.heard_ns = self._moved_ns = self._probed_ns = now_ns

    def heard(self, now_ns: int) -> None:
        self.heard_ns = now_ns

    def arrived(self, total_bytes: int, now_ns: int) -> None:
        """``total_bytes`` of the transfer are known to have arrived."""
        if total_bytes > self._arrived:
            self._arrived = total_bytes
            self._moved_ns = now_ns

    def check(self, now_ns: int, sent_bytes: int, silence_ns: int, peer: str) -> Verdict:
        """``sent_bytes`` are known to have left; ``silence_ns`` is the longest silence allowed now."""
        if sent_bytes <= self._arrived:
            self._moved_ns = now_ns
        silent, still = now_ns - self.heard_ns, now_ns - self._moved_ns
        asked = self._probed_ns > self.heard_ns
        due = now_ns - self._probed_ns >= self._probe_ns // 2
        if silent >= silence_ns and asked and due:
            return Verdict(reason=f"{peer} silent for {silent / 1e9:.1f} s")
        if still >= self._stall_ns:
            missing = sent_bytes - self._arrived
            return Verdict(reason=f"no byte arrived for {still / 1e9:.1f} s, {missing} are under way")
        if max(silent, still) >= self._probe_ns and (due or not asked):
            self._probed_ns = now_ns
            return Verdict(probe=True)
        return QUIET
