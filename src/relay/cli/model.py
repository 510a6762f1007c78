"""``relay model``: bring models to this machine, see what is there, look inside, remove."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import click

from relay.models.cache import cached_packs, remove_cached
from relay.models.catalogue import DEFAULT_MODEL
from relay.models.loaded import LoadedModel
from relay.models.pack import Storage
from relay.models.progress import console_progress
from relay.models.store import ModelStore, default_cache_dir

_cache_option = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=lambda: default_cache_dir(os.environ),
    help="Cache folder [default: $RELAY_CACHE, else ~/.cache/relay].",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def model() -> None:
    """Models on this machine."""


@model.command()
@click.argument("model_name", metavar="MODEL", default=DEFAULT_MODEL)
@click.option(
    "--storage",
    type=click.Choice(["native", "float32", "direct"]),
    default="native",
    help="Keep weights as the file has them, widen them to fp32 (same logits, more memory), or leave them in safetensors (GPUs).",
)
@click.option("--offline", is_flag=True, help="Never touch the network.")
@_cache_option
def pull(model_name: str, storage: Storage, offline: bool, cache_dir: Path) -> None:
    """Fetch MODEL (a short name, org/name, a folder or a GGUF file) and pack it; a damaged pack is made anew."""
    store = ModelStore(cache_dir, offline=offline, progress=console_progress())
    loaded = store.pull(model_name, storage)
    click.echo(f"{loaded.name}: {_size(loaded.pack.file_bytes)}, digest {loaded.digest[:16]}, {loaded.pack.path}")


@model.command("list")
@_json_option
@_cache_option
def list_command(as_json: bool, cache_dir: Path) -> None:
    """List the packs in the cache."""
    packs = cached_packs(cache_dir)
    if as_json:
        rows = [
            {
                "name": pack.name,
                "path": str(pack.path),
                "bytes": pack.num_bytes,
                "digest": pack.digest,
                "architecture": pack.architecture,
                "problem": pack.problem,
            }
            for pack in packs
        ]
        click.echo(json.dumps({"models": rows}))
        return
    for pack in packs:
        click.echo(
            f"{pack.name}  {_size(pack.num_bytes)}  {pack.problem or f'{pack.architecture}  {pack.digest[:16]}'}"
        )
    if not packs:
        click.echo(f"no models in {cache_dir}; bring one with: relay model pull {DEFAULT_MODEL}")


@model.command()
@click.argument("model_name", metavar="MODEL", default=DEFAULT_MODEL)
@click.option("--verify", is_flag=True, help="Read every byte and compare with the digest.")
@_json_option
@_cache_option
def inspect(model_name: str, verify: bool, as_json: bool, cache_dir: Path) -> None:
    """Show what MODEL is. Never touches the network; a local file not seen before is packed first."""
    loaded = ModelStore(cache_dir, offline=True, progress=console_progress()).open(model_name)
    if verify:
        loaded.pack.verify()
    facts = describe(loaded)
    if verify:
        facts["verified"] = True
    if as_json:
        click.echo(json.dumps(facts))
        return
    width = max(len(key) for key in facts)
    for key, value in facts.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        click.echo(f"{key.replace('_', ' '):<{width}}  {shown}")


@model.command()
@click.argument("model_name", metavar="MODEL")
@_cache_option
def rm(model_name: str, cache_dir: Path) -> None:
    """Remove MODEL (as listed, a short name, org/name, or the path it was packed from) from the cache. Files elsewhere are
    never touched."""
    click.echo(f"removed {model_name}: {_size(remove_cached(cache_dir, model_name))}")


def describe(loaded: LoadedModel) -> dict[str, Any]:
    """The facts ``inspect`` prints."""
    config = loaded.config
    vectors = [entry for entry in loaded.pack.header.entries if entry.kind == "vector"]
    encodings = Counter[str]()
    weights = 0
    for rows in loaded.pack.matrices():
        encodings[rows.encoding] += rows.num_bytes
        weights += rows.values
    weights += sum(entry.shape[0] for entry in vectors if not entry.name.startswith("rope."))
    tokenizer = loaded.tokenizer if loaded.tokenizer_files.json else None
    eos = {str(i): (tokenizer.token(i) or "") if tokenizer else "" for i in config.eos_token_ids}
    return {
        "name": loaded.name,
        "digest": loaded.digest,
        "path": str(loaded.pack.path),
        "bytes": loaded.pack.file_bytes,
        "architecture": config.architecture,
        "parameters": weights,
        "storage": loaded.pack.header.storage,
        "encodings": dict(encodings),
        "layers": config.num_layers,
        "hidden": config.hidden,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab,
        "context_length": config.max_positions,
        "rope": config.rope.kind,
        "eos": eos,
        "chat_template": loaded.chat_template is not None,
    }


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
