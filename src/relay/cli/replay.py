"""``relay replay``: the decisions of a recorded core, made again."""

import json
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from relay.control.record import GatewayPlayer
from relay.record.commit import commit
from relay.record.frames import BadRecording, Head, Recording, read
from relay.record.replay import Player, Replay
from relay.record.replay import replay as run_again
from relay.worker.record import WorkerPlayer

DIFFERENT_STATUS = 1
PLAYERS: dict[str, Callable[[Head], Player]] = {"gateway": GatewayPlayer.of, "worker": WorkerPlayer.of}


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--cut", is_flag=True, help="Take a file that was cut off, as a killed process leaves it.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, without the decisions.")
def replay(file: Path, cut: bool, as_json: bool) -> int:
    """Run the core that FILE recorded again: same events, same times. Exit 1 if it decides anything else now."""
    recording = read(file, cut=cut)
    if recording.head.kind == "sim":
        from relay.cli.sim import play_tape

        return play_tape(recording, as_json=as_json, story=True)
    if recording.head.commit != commit():
        click.echo(
            f"relay: {file} was recorded with {recording.head.commit}, this is {commit()}: decisions may differ",
            err=True,
        )
    try:
        player = PLAYERS[recording.head.kind](recording.head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRecording(f"the settings in {file} do not fit this version: {error}") from error
    result = run_again(recording, player)
    if as_json:
        click.echo(json.dumps(_summary(recording, result)))
    else:
        _print(recording, result)
    return 0 if result.difference is None else DIFFERENT_STATUS


def _summary(recording: Recording, result: Replay) -> dict[str, object]:
    head, difference = recording.head, result.difference
    return {
        "kind": head.kind,
        "name": head.name,
        "commit": head.commit,
        "ended": recording.ended,
        "events": result.events,
        "commands": result.commands,
        "identical": difference is None,
        "difference": None if difference is None else str(difference),
    }


def _print(recording: Recording, result: Replay) -> None:
    for line in result.stories:
        click.echo(line)
    head = recording.head
    end = "cut off" if recording.ended is None else f"ended: {recording.ended}"
    click.echo(f"{head.kind} {head.name}, {result.events} events, {result.commands} commands, {end}")
    if result.unanswered and result.difference is None:
        click.echo("the recorded process ended while, or right after, it handled the last event")
    click.echo("identical" if result.difference is None else f"different: {result.difference}")
