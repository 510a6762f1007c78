"""stderr of a server whose reader is slow, stuck or gone."""

import os

from relay.cli.console import MAX_LINES, Console


def read_all(descriptor: int) -> list[str]:
    data = b""
    while chunk := os.read(descriptor, 1 << 16):
        data += chunk
    return data.decode().splitlines()


def test_lines_come_in_order_and_whole() -> None:
    reader, writer = os.pipe()
    console = Console(writer)
    for index in range(100):
        console.say(f"line {index}")
    console.finish(10.0)
    os.close(writer)
    assert read_all(reader) == [f"line {index}" for index in range(100)]
    os.close(reader)


def test_a_stuck_reader_blocks_nobody_and_hears_what_it_missed() -> None:
    reader, writer = os.pipe()
    console = Console(writer)
    for index in range(10 * MAX_LINES):  # far more than a pipe holds
        console.say(f"line {index} " + "x" * 100)
    got = b""
    while b"line 40000 " not in got and not got.endswith(b"\nend\n"):
        got += os.read(reader, 1 << 16)
        console.say("end")
    console.finish(10.0)
    os.close(writer)
    assert "lines dropped" in got.decode() + "\n".join(read_all(reader))
    os.close(reader)


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    console = Console(writer)
    os.close(reader)
    for index in range(10):
        console.say(f"line {index}")
    console.finish(10.0)
    assert not console._thread.is_alive()
    os.close(writer)
