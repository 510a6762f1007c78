"""Losing packets: what nft is told, and that a port on a loopback of our own is really cut off and comes back."""

import os
import shutil
import subprocess
import sys

import pytest

from relay.chaos import netns
from relay.chaos.packets import Flow, PacketsUnavailable, rules
from tests.cli.serving import ENVIRONMENT

TALK = """
import socket
from relay.chaos.netns import enter
from relay.chaos.packets import Flow, Packets

def reaches(port):
    with socket.socket() as client:
        client.settimeout(0.3)
        try:
            client.connect(("127.0.0.1", port))
        except TimeoutError:
            return False
    return True

enter()
packets = Packets()
with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
    ports = [server.getsockname()[1] for server in (one, other)]
    before = [reaches(port) for port in ports]
    table = packets.lose([Flow(0, ports[0])], percent=100)
    during = [reaches(port) for port in ports]
    lost = packets.lost(table)
    packets.heal(table)
    print(before, during, lost > 0, [reaches(port) for port in ports])
    packets.lose([Flow(0, ports[0])], percent=100)  # and it is left to the end of the namespace
"""

TRY = """
from relay.chaos.netns import enter
from relay.chaos.packets import PacketsUnavailable

try:
    enter()
except PacketsUnavailable as error:
    print(error, end="")
"""


def namespace() -> str:
    with open("/proc/self/ns/net") as file:
        return os.readlink(f"/proc/self/fd/{file.fileno()}")


def unavailable() -> str:
    """Why it cannot be tried here, in the words of ``relay chaos --netns``; empty where it can."""
    command = [sys.executable, "-c", TRY]
    return subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True, timeout=60).stdout


def test_rules_name_ports_both_ways_and_roll_a_die_below_100_percent():
    up = Flow(40001, 9000)
    assert rules("t", [up, up.back], 100).splitlines() == [
        "table inet t {",
        "  chain lost {",
        "    type filter hook input priority 0; policy accept;",
        "    tcp sport 40001 tcp dport 9000 counter drop",
        "    tcp sport 9000 tcp dport 40001 counter drop",
        "  }",
        "}",
    ]
    (rule,) = [line.strip() for line in rules("t", [Flow(0, 9000)], 30).splitlines() if "drop" in line]
    assert rule == "tcp dport 9000 numgen random mod 100 < 30 counter drop"


def test_packets_are_lost_in_a_namespace_and_nowhere_else():
    if why := unavailable():
        pytest.skip(why)
    before = namespace()
    command = [sys.executable, "-c", TALK]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr == ""
    assert ended.stdout.strip() == "[True, True] [False, True] True [True, True]"
    assert namespace() == before
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "relay_chaos" not in tables


def test_without_nft_it_says_so_and_stays_where_it_is(monkeypatch):
    before = namespace()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PacketsUnavailable, match="no program nft"):
        netns.enter()
    assert namespace() == before


def test_without_the_right_to_it_says_so(monkeypatch):
    before = namespace()
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/sbin/nft")
    monkeypatch.setattr(netns, "_libc", Refusing())
    with pytest.raises(PacketsUnavailable, match="needs root"):
        netns.enter()
    assert namespace() == before


class Refusing:
    """A kernel that allows no new namespace."""

    def unshare(self, flags: int) -> int:
        return -1
