"""Recordings: a core that ran again decides the same, and a file that is something else is refused."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relay.cli.main import run
from relay.control.record import GatewayPlayer, GatewayRecorder
from relay.record import frames
from relay.record.commit import commit
from relay.record.frames import BadRecording, Happened, read
from relay.record.replay import replay
from relay.record.writer import SPARE_BYTES, Writer
from relay.sim.engine import EngineProcess
from relay.sim.tape import Tape
from relay.sim.world import World
from relay.worker.record import Advanced, WorkerPlayer, WorkerRecorder, WorkerSettings

SEED = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the cores of one simulated cluster were told and decided."""
    folder = tmp_path_factory.mktemp("recorded")
    patch = pytest.MonkeyPatch()
    recorders: list[Any] = []

    def record_worker(engine: EngineProcess) -> None:
        core, swarm = engine.core, engine._swarm
        settings = WorkerSettings(swarm.worker, swarm.scheduler, engine.numerics)
        name = f"{engine.key.worker}-{engine.key.incarnation}"
        recorder = WorkerRecorder(folder / f"{name}.relay", name, settings)
        recorders.append(recorder)
        handle, advance = core.handle, core.advance

        def handled(event: Any, now_ns: int) -> Any:
            recorder.happened(event, now_ns)
            commands = handle(event, now_ns)
            recorder.decided(commands)
            return commands

        def advanced(now_ns: int) -> Any:
            recorder.happened(Advanced(), now_ns)
            commands = advance(now_ns)
            recorder.decided(commands)
            return commands

        core.handle, core.advance = handled, advanced  # type: ignore[method-assign]

    made = EngineProcess.__init__

    def make(engine: EngineProcess, *arguments: Any) -> None:
        made(engine, *arguments)
        record_worker(engine)

    patch.setattr(EngineProcess, "__init__", make)
    world = World(Tape(SEED))
    core = world.gateway.core
    gateway = GatewayRecorder(folder / "gateway.relay")
    gateway.attach(core)
    handle = core.handle

    def handled(event: Any, now_ns: int) -> Any:
        gateway.happened(event, now_ns)
        commands = handle(event, now_ns)
        gateway.decided(commands)
        return commands

    core.handle = handled  # type: ignore[method-assign]
    world.run()
    patch.undo()
    for recorder in [gateway, *recorders]:
        recorder.close()
    return folder


def test_a_gateway_decides_the_same_again(recorded: Path) -> None:
    recording = read(recorded / "gateway.relay")
    result = replay(recording, GatewayPlayer.of(recording.head))
    assert result.difference is None
    assert recording.ended == "closed"
    assert result.events > 100
    assert result.commands > 10
    assert any("attempt 1" in line for line in result.stories)


def test_workers_decide_the_same_again(recorded: Path) -> None:
    files = sorted(recorded.glob("*-*.relay"))
    assert len(files) > 1
    events = 0
    for file in files:
        recording = read(file)
        result = replay(recording, WorkerPlayer.of(recording.head))
        assert result.difference is None, f"{file.name}: {result.difference}"
        events += result.events  # an engine may end before it hears anything
    assert events > 100


def test_another_decision_is_the_first_difference(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = read(recorded / "gateway.relay")
    player = GatewayPlayer.of(recording.head)
    play = player.play
    changed: list[int] = []

    def play_less(frame: Happened, answers: list[msgspec.Raw]) -> list[Any]:
        commands = play(frame, answers)
        if frame.name == "RequestSubmitted" and commands:
            changed.append(frame.now_ns)
            return commands[1:]
        return commands

    result = replay(recording, _Changed(play_less, player))
    assert result.difference is not None
    assert result.difference.event == "RequestSubmitted"
    assert [result.difference.now_ns] == changed


class _Changed:
    def __init__(self, play: Any, player: GatewayPlayer) -> None:
        self.play = play
        self.stories = player.stories


def test_a_core_that_raises_is_a_difference(recorded: Path) -> None:
    recording = read(recorded / "gateway.relay")
    player = GatewayPlayer.of(recording.head)

    def fail(frame: Happened, answers: list[msgspec.Raw]) -> list[Any]:
        raise KeyError("gone")

    result = replay(recording, _Changed(fail, player))
    assert result.difference is not None
    assert "KeyError" in result.difference.now[0]


def test_the_command_tells_and_compares(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(recorded / "gateway.relay")]) == 0
    out = capsys.readouterr().out
    assert out.endswith("identical\n")
    assert "attempt 1" in out
    assert run(["replay", "--json", str(recorded / "gateway.relay")]) == 0
    answer = msgspec.json.decode(capsys.readouterr().out)
    assert answer["identical"] is True
    assert answer["kind"] == "gateway"


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("relay: ")
    assert error.count("\n") == 1
    return error


def test_files_that_are_something_else(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (recorded / "gateway.relay").read_bytes()
    file = tmp_path / "x.relay"
    assert "No such file" in _refused([str(tmp_path / "none")], capsys)
    file.write_bytes(b"\x7fELF" + bytes(100))
    assert "is no recording" in _refused([str(file)], capsys)
    file.write_bytes(b"")
    assert "is no recording" in _refused([str(file)], capsys)
    file.write_text('{"format": "relay-sim-tape", "format_version": 1}\n')
    assert "format version 1" in _refused([str(file)], capsys)
    file.write_bytes(whole[: len(whole) // 2])
    assert "truncated" in _refused([str(file)], capsys)
    file.write_bytes(whole[: len(frames.MAGIC) + 2])
    assert "truncated" in _refused([str(file)], capsys)
    file.write_bytes(whole[: _end_of(whole)])
    assert "cut off" in _refused([str(file)], capsys)
    head = read(recorded / "gateway.relay").head
    file.write_bytes(frames.whole(msgspec.structs.replace(head, format_version=99), []))
    assert "format version 99" in _refused([str(file)], capsys)
    file.write_bytes(frames.whole(msgspec.structs.replace(head, settings=msgspec.Raw(b"\x80")), []))
    assert "do not fit this version" in _refused([str(file)], capsys)
    file.write_bytes(frames.whole(head, [Happened(1, "Earthquake", msgspec.Raw(b"\x80"))]))
    assert "'Earthquake'" in _refused([str(file)], capsys)
    nested = b"\x91" * 100_000
    file.write_bytes(frames.MAGIC + len(nested).to_bytes(frames.LENGTH_BYTES, "little") + nested)
    assert "no readable head" in _refused([str(file)], capsys)
    file.write_bytes(frames.whole(head, [Happened(1, "Beat", msgspec.Raw(nested + b"\x90"))]))
    assert "damaged at frame 0" in _refused([str(file)], capsys)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "no regular file" in _refused([str(pipe)], capsys)
    assert "no regular file" in _refused(["/dev/zero"], capsys)


def _end_of(data: bytes) -> int:
    """Where the end mark begins."""
    at, start = 0, len(frames.MAGIC)
    while start < len(data):
        at = start
        start += frames.LENGTH_BYTES + int.from_bytes(data[start : start + frames.LENGTH_BYTES], "little")
    return at


def test_a_recording_with_an_end_is_what_was_written_to_the_last_bit(tmp_path: Path) -> None:
    """Whichever bit is turned, the file is refused, as it is with a frame less, or with bytes behind its end; so with ``cut``."""
    events = [Happened(number, "E", msgspec.Raw(b"\xc0")) for number in range(3)]
    head = frames.head("gateway", "g", "c", b"\xc0")
    data = frames.whole(head, events)
    file = tmp_path / "x.relay"
    file.write_bytes(data)
    assert read(file).frames == events
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(BadRecording):
            read(file)
    less = frames.opening(head) + b"".join(frames.encode(event) for event in events[:2]) + data[_end_of(data) :]
    for content, complaint in (
        (less, "digest"),
        (data.replace(b"gateway", b"workers", 1), "."),
        (data + b"\0", "bytes follow its end mark"),
        (data + data[_end_of(data) :], "bytes follow its end mark"),
    ):
        file.write_bytes(content)
        for cut in (False, True):
            with pytest.raises(BadRecording, match=complaint):
                read(file, cut=cut)
    file.write_bytes(data[: _end_of(data)])
    assert read(file, cut=True).frames == events


def test_what_a_killed_process_leaves(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (recorded / "gateway.relay").read_bytes()
    file = tmp_path / "killed.relay"
    file.write_bytes(whole[: len(whole) // 2])
    assert run(["replay", "--cut", str(file)]) == 0
    out = capsys.readouterr().out
    assert "cut off" in out
    assert out.endswith("identical\n")


def test_another_commit_is_said(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = read(recorded / "gateway.relay")
    other = msgspec.structs.replace(recording.head, commit="f" * 40)
    file = tmp_path / "other.relay"
    file.write_bytes(frames.whole(other, []))
    assert run(["replay", str(file)]) == 0
    assert f"was recorded with {'f' * 40}" in capsys.readouterr().err


def test_a_copy_of_the_source_is_named_by_who_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_COMMIT", "0123abc")
    assert commit.__wrapped__() == "0123abc"
    monkeypatch.delenv("RELAY_COMMIT")
    assert commit.__wrapped__() != "0123abc"


def test_a_recording_ends_at_its_size_limit(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "small.relay", SPARE_BYTES + 1000)
    writer.begin(frames.head("gateway", "g", "c", b"\xc0"))
    count = 0
    while writer.recording:
        writer.happened(Happened(count, "E", msgspec.Raw(b"\xc0")))
        writer.decided([])
        count += 1
        assert count < 1000
    writer.happened(Happened(count, "E", msgspec.Raw(b"\xc0")))
    writer.close()
    recording = read(tmp_path / "small.relay")
    assert recording.ended == "size limit"
    assert 0 < len(recording.frames) <= 2 * count
    assert (tmp_path / "small.relay").stat().st_size <= SPARE_BYTES + 1000
    assert (tmp_path / "small.relay").stat().st_mode & 0o077 == 0


def test_a_full_disk_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer(Path("/dev/full"))
    writer.begin(frames.head("gateway", "g", "c", b"\xc0"))
    writer.happened(Happened(0, "E", msgspec.Raw(b"\xc0")))
    assert not writer.recording
    assert "No space left" in caplog.text
    writer.decided([])
    writer.close()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot record to"):
        Writer(tmp_path / "file" / "x.relay")
    with pytest.raises(BadRecording):
        read(tmp_path)
