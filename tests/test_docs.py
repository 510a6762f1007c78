"""The pages are true where a machine can tell: links, file names, flags, exit codes and metrics."""

import re
import shlex
from pathlib import Path

import click
import msgspec
import pytest

from relay.api.types import ChatRequest, CompletionRequest
from relay.cli.banner import first_request
from relay.cli.main import cli
from relay.cli.serve import serve
from relay.errors import RelayError

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "relay"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
FOLDERS = "|".join(
    sorted(path.name for path in [*SOURCE.iterdir(), *ROOT.iterdir()] if path.is_dir() and path.name[0].isalpha())
)


def alternatives(path: str) -> list[str]:
    """``a/{b,c}.py`` as two paths."""
    match = re.fullmatch(r"(.*)\{(.*)\}(.*)", path)
    return [match[1] + part + match[3] for part in match[2].split(",")] if match else [path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    missing = [target for target in links if not (page.parent / target).exists()]
    named = re.findall(rf"`((?:{FOLDERS})/[\w./{{}},-]+\.(?:py|c|h|md|json|sh))`", text)
    for path in [one for name in named for one in alternatives(name)]:
        if not (ROOT / path).exists() and not (SOURCE / path).exists():
            missing.append(path)
    assert not missing


def test_no_page_or_result_names_a_folder_of_the_machine_it_was_made_on() -> None:
    """Commands of results are printed in the pages, for anyone to run."""
    pages = [*PAGES, *(ROOT / "benchmarks" / "results").rglob("*.json")]
    found = {
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages
        for path in re.findall(r"(?:^|[\s\"'`=:,(])(/(?:root|home|tmp|work|mnt)/[^\s\"'`,)]+)", page.read_text())
    }
    assert not found


def test_anchors_exist() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
            headings = re.findall(r"^#+ (.+)$", ((page.parent / target) if target else page).read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_operations_names_every_flag_with_its_default() -> None:
    for option in serve.params:
        if not isinstance(option, click.Option):
            continue
        row = next(
            (line for line in OPERATIONS.splitlines() if line.startswith("|") and f"`{option.opts[0]}`" in line), ""
        )
        assert row, f"{option.opts[0]} is not in docs/operations.md"
        if isinstance(option.default, int | float | str) and not isinstance(option.default, bool):
            shown = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
            assert shown in row.split("|")[2], f"{option.opts[0]}: the default is {shown}"


def flags_of(command: click.Command, within: tuple[str, ...] = ()) -> dict[tuple[str, ...], set[str]]:
    """Flags by command, ``relay`` itself being ()."""
    found = {within: {"--help"}}
    for option in command.params:
        if isinstance(option, click.Option):
            found[within].update([*option.opts, *option.secondary_opts])
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                found |= flags_of(inner, (*within, name))
    return found


FLAGS = flags_of(cli)
FLAG = r"(?<![\w-])--[a-z][a-z-]*"


def unknown_flags(command: str) -> list[str]:
    """Of a command line that begins with ``relay``."""
    words = command.split("#")[0].split()[1:]
    depth = max(depth for depth in range(len(words) + 1) if tuple(words[:depth]) in FLAGS)
    return [flag for flag in re.findall(FLAG, " ".join(words)) if flag not in FLAGS[tuple(words[:depth])]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_the_pages_have_their_flags(page: Path) -> None:
    text = page.read_text()
    spans = re.findall(r"`(relay [^`]*)`", text)
    lines = re.findall(r"^(?:\.venv/bin/)?(relay [^;|&\n]*)", text, re.MULTILINE)
    assert not {command: unknown for command in [*spans, *lines] if (unknown := unknown_flags(command))}


def test_operations_names_no_flag_that_is_none() -> None:
    assert set(re.findall(FLAG, OPERATIONS)) <= set().union(*FLAGS.values())


@pytest.mark.parametrize(
    ("command", "heading"),
    [("serve", "`relay serve [MODEL]`"), ("verify", "Checking a machine"), ("chaos", "`relay chaos`")],
)
def test_a_commands_section_names_its_flags_and_no_others_in_its_table(command: str, heading: str) -> None:
    section = OPERATIONS.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    assert set(re.findall(FLAG, section)) >= FLAGS[(command,)] - {"--help"}
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `--")]
    assert set(re.findall(FLAG, " ".join(rows))) <= FLAGS[(command,)]


def test_operations_names_every_exit_code() -> None:
    for kind in RelayError.__subclasses__():
        assert f"\n| {kind.exit_code} |" in OPERATIONS, kind.__name__


def test_operations_names_every_counter() -> None:
    counters = {
        name
        for path in (SOURCE / "control").glob("*.py")
        for name in re.findall(r"counters\[\"(\w+)\"\]", path.read_text())
    }
    assert "resumed" in counters
    for name in counters:
        assert f"`relay_{name}_total`" in OPERATIONS, name


def test_the_readme_stays_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") < 200


def test_the_readmes_requests_are_requests_and_end() -> None:
    """The first is what ``relay serve`` prints; each is bounded, and the one to interrupt runs for a while whatever is sampled."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^curl .*$", text, re.MULTILINE)
    requests = []
    for command in commands:
        words = shlex.split(command)
        kind = ChatRequest if words[2].endswith("/v1/chat/completions") else CompletionRequest
        requests.append(msgspec.json.decode(words[words.index("-d") + 1], type=kind))
        assert requests[-1].max_tokens, command
    assert shlex.split(commands[0]) == shlex.split(first_request("http://127.0.0.1:8000", "smollm2"))
    assert any(request.ignore_eos and request.stream and request.max_tokens >= 2000 for request in requests)
