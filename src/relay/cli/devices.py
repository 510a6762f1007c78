"""``relay devices``, and what a start says and checks about them."""

import json
import os
from dataclasses import asdict

import click

from relay.cluster.nvml import detect
from relay.cluster.topology import Need, Topology, check, describe
from relay.config import ServeConfig
from relay.devices import place
from relay.models.config import ModelConfig
from relay.models.layout import MatrixItem, weight_items


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def devices(as_json: bool) -> int:
    """Show the GPUs of this machine and how they are connected."""
    topology = detect(os.environ)
    if as_json:
        links = [{"devices": list(pair), **asdict(link)} for pair, link in sorted(topology.links.items())]
        gpus = [{"device": gpu.device, **asdict(gpu)} for gpu in topology.gpus]
        click.echo(json.dumps({"gpus": gpus, "links": links, "problem": topology.problem}))
    else:
        click.echo("\n".join(describe(topology)) or "no GPU")
    return 1 if topology.problem else 0


def device_lines(config: ServeConfig, model: ModelConfig, topology: Topology) -> list[str]:
    """For the banner: what there is, who gets what, what to know. Raises UsageError or DoesNotFitError where that cannot work."""
    worker = config.worker
    placement = place(config.slots, worker.devices, worker.by_role)
    notes = check(placement, dict(config.slots), topology, need_of(config, model), worker.transport)
    placed = ", ".join(f"{name} on {' + '.join(devices)}" for name, devices in placement.items())
    return [*describe(topology), placed, *notes]


def need_of(config: ServeConfig, model: ModelConfig) -> Need:
    """Memory of one rank of one worker, the parts that every rank repeats counted whole. What int8 leaves in 16 bits is the
    embedding, and a rank's part of a head that is tied to it; scales are too small to count."""
    worker, ranks = config.worker, config.worker.by_role.ranks
    sizes = {item.name: 2 * item.n * item.k for item in weight_items(model) if isinstance(item, MatrixItem)}
    repeated = sizes["embed"]
    linears = (sum(sizes.values()) - repeated) // (2 if worker.quantization else 1)
    if model.tied_embeddings and ranks > 1:
        linears += repeated  # a rank's part of the head is a matrix of its own
    weights = repeated + linears // ranks
    context = worker.max_model_len or worker.block_size
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * worker.kv_bytes_per_value
    return Need(
        weight_bytes=weights,
        kv_bytes=worker.kv_cache_memory_bytes // ranks,
        least_kv_bytes=context * token_bytes // ranks,
        utilization=worker.gpu_memory_utilization,
    )
