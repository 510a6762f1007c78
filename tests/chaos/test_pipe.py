"""The byte proxy over real sockets: what passes, and what each injury makes of it."""

import asyncio
import contextlib
import socket
import time

import pytest

from relay.chaos.pipe import Connection, Injury

DATA = bytes(range(256)) * 40


async def connected(injury=None):
    """(dialler's reader and writer, listener's reader and writer, connection); the first chunk upwards is hurt."""
    arrived: asyncio.Queue = asyncio.Queue()
    server = await asyncio.start_server(lambda r, w: arrived.put_nowait((r, w)), "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[:2]
    loop = asyncio.get_running_loop()
    waiting = [injury]
    connection = Connection(
        lambda data: (data, waiting.pop() if waiting else None), lambda data: (data, None), lambda end: None
    )

    async def dial():
        await loop.create_connection(lambda: connection.listener, *target)
        connection.up.flush_early()

    dialling = []

    def accept():
        dialling.append(loop.create_task(dial()))
        return connection.dialler

    proxy = await loop.create_server(accept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname()[:2])
    far_reader, far_writer = await arrived.get()
    proxy.close()
    server.close()
    return reader, writer, far_reader, far_writer, connection


async def read_all(reader):
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := await reader.read(1 << 16):
            data += chunk
    return data


def run(story):
    async def bounded():
        async with asyncio.timeout(20):
            await story()

    asyncio.run(bounded())


def test_bytes_and_ends_pass_both_ways():
    async def story():
        reader, writer, far_reader, far_writer, _ = await connected()
        writer.write(DATA * 300)
        writer.write_eof()
        assert await read_all(far_reader) == DATA * 300
        far_writer.write(DATA)
        far_writer.write_eof()
        assert await read_all(reader) == DATA
        writer.close()
        far_writer.close()

    run(story)


def test_the_death_of_one_side_reaches_the_other():
    async def story():
        reader, writer, _, far_writer, _ = await connected()
        far_writer.transport.abort()
        assert await read_all(reader) == b""
        writer.close()

    run(story)


@pytest.mark.parametrize("harm", ["cut", "truncate"])
def test_cut_and_truncated(harm):
    async def story():
        reader, writer, far_reader, far_writer, _ = await connected(Injury(harm, offset=100))
        writer.write(DATA)
        got = await read_all(far_reader)
        assert got == DATA[:100] or (harm == "cut" and DATA.startswith(got))  # a reset may overtake bytes
        assert await read_all(reader) == b""
        writer.close()
        far_writer.close()

    run(story)


def test_corrupt_flips_one_bit():
    async def story():
        _, writer, far_reader, far_writer, _ = await connected(Injury("corrupt", offset=300, bit=3))
        writer.write(DATA)
        writer.write_eof()
        expected = bytearray(DATA)
        expected[300] ^= 8
        assert await read_all(far_reader) == expected
        writer.close()
        far_writer.close()

    run(story)


def test_half_closed_the_other_direction_lives():
    async def story():
        reader, writer, far_reader, far_writer, _ = await connected(Injury("half_close", offset=7))
        writer.write(DATA)
        assert await read_all(far_reader) == DATA[:7]
        far_writer.write(DATA)
        assert await reader.readexactly(len(DATA)) == DATA
        writer.close()
        far_writer.close()

    run(story)


def test_delayed_bytes_arrive_late_even_after_the_senders_end():
    async def story():
        _, writer, far_reader, far_writer, _ = await connected(Injury("delay", seconds=0.3))
        began = time.monotonic()
        writer.write(DATA)
        writer.transport.close()
        assert await read_all(far_reader) == DATA
        assert time.monotonic() - began >= 0.29
        far_writer.close()

    run(story)


def test_one_way_swallows_and_ends():
    async def story():
        reader, writer, far_reader, far_writer, _ = await connected(Injury("one_way", seconds=0.2))
        writer.write(DATA)
        far_writer.write(b"still heard")
        assert await reader.readexactly(11) == b"still heard"
        assert await read_all(far_reader) == b""
        writer.close()
        far_writer.close()

    run(story)


def test_armed_injuries_wait_for_bytes():
    async def story():
        _, writer, far_reader, far_writer, connection = await connected()
        writer.write(b"whole")
        assert await far_reader.readexactly(5) == b"whole"
        done = []
        connection.up.arm(Injury("corrupt", offset=0, bit=0), lambda: done.append(1))
        writer.write(b"Aa")
        assert await far_reader.readexactly(2) == b"@a"
        assert done == [1]
        writer.close()
        far_writer.close()

    run(story)


def test_an_end_that_meets_a_reset_peer_is_no_failure():
    async def story():
        _, writer, far_reader, far_writer, connection = await connected()
        writer.write(b"whole")
        assert await far_reader.readexactly(5) == b"whole"
        target = connection.up.target
        assert target is not None
        target.get_extra_info("socket").shutdown(
            socket.SHUT_RDWR
        )  # what a reset leaves: the loop has not heard of it yet
        connection.up.hurt(Injury("half_close", offset=0), b"")
        writer.close()
        far_writer.close()

    run(story)
