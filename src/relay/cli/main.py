"""The ``relay`` command. Sub-commands are imported when they are asked for, so that ``relay --help`` is quick."""

import errno
import importlib
import os
import sys
from collections.abc import Sequence

import click

from relay import __version__
from relay.errors import RelayError

COMMANDS = {
    "replay": ("relay.cli.replay", "replay", "Run a recorded core again."),
    "serve": ("relay.cli.serve", "serve", "Serve a model over HTTP."),
    "drain": ("relay.cli.leave", "drain", "Take workers out without dropping a request."),
    "restart": ("relay.cli.leave", "restart", "Restart workers without dropping a request."),
    "proxy": ("relay.cli.proxy", "proxy", "Keep streams whole for clients that do not resume."),
    "status": ("relay.cli.status", "status", "Show the workers of a running server."),
    "devices": ("relay.cli.devices", "devices", "GPUs of this machine and their links."),
    "model": ("relay.cli.model", "model", "Models on this machine."),
    "sim": ("relay.cli.sim", "sim", "Simulate clusters under faults, from seeds."),
    "chaos": ("relay.cli.chaos", "chaos", "Kill real workers; compare every answer."),
    "bench": ("relay.cli.bench", "bench", "Measure parts of Relay on this machine."),
    "verify": ("relay.cli.verify", "verify", "Compare every path bit for bit."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*COMMANDS, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, text) for name, (_, _, text) in COMMANDS.items()]
        rows += [(name, command.get_short_help_str()) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="relay")
def cli() -> None:
    """Relay: disaggregated, fault-tolerant LLM serving with bit-identical output on every path."""


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code. Expected errors are one line on stderr."""
    try:
        result = cli.main(args=arguments, prog_name="relay", standalone_mode=False)
        sys.stdout.flush()
    except RelayError as error:
        return _complain(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:  # its message is the whole help: no error line
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of our output went away, as with `relay model list | head`
        sys.stderr.close()
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _forget_output()
        return _complain(f"the output could not be written: {error.strerror}", 1)
    return result if isinstance(result, int) else 0


def _forget_output() -> None:
    """What stdout still holds goes nowhere, so that the interpreter does not try to write it once more as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _complain(text: str, exit_code: int) -> int:
    click.echo(f"relay: {' '.join(text.split())}", err=True)
    return exit_code


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
