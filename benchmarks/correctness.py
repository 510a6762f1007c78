"""Greedy tokens and logits of the packed SmolLM2 against transformers' own fp32 load of the same GGUF.

For each prompt transformers draws greedily; Relay's CPU backend gets the same tokens and its logits before every one of them are
compared: the highest must be the token drawn (so free-running output is the same text), and max|Δ| / max|logit| of each row
is recorded. Where the two part, the reference's gap between its two best logits is printed; it must be < 1e-3.

    python -m benchmarks.correctness [--prompts 32] [--tokens 64] [--threads 1] [--json FILE]
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.prompts import PROMPTS
from benchmarks.report import provenance
from benchmarks.teacher_forcing import BLOCK_SIZE, forced_logits
from relay.kernels.cpu.backend import CpuBackend
from relay.models.catalogue import ALIASES
from relay.models.loaded import LoadedModel
from relay.models.store import default_cache_dir, open_model

PARTING_GAP = 1e-3


def reference_model(gguf: Path) -> Any:
    """transformers' fp32 model of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()


def reference_greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """(tokens drawn, fp32 logits [count, vocab]) of transformers' ``generate``, not stopping at EOS."""
    import torch

    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float().numpy()


def cpu_backend(loaded: LoadedModel, threads: int, max_tokens: int = 1024) -> CpuBackend:
    """A CPU backend with ``loaded`` and room for one sequence of ``max_tokens``."""
    backend = CpuBackend(threads, max_tokens=max_tokens)
    backend.load(loaded.program, loaded.pack)
    backend.allocate_kv(max_tokens // BLOCK_SIZE, BLOCK_SIZE, "float32")
    return backend


def compare(ours: np.ndarray, theirs: np.ndarray, drawn: list[int]) -> dict[str, Any]:
    """One prompt's figures. ``partings``: steps at which the highest logit differs, with the reference's top-2 gap."""
    errors = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max(axis=1)
    partings = []
    for step in np.flatnonzero(ours.argmax(axis=1) != np.array(drawn)):
        second, first = np.partition(theirs[step], -2)[-2:]
        partings.append({"step": int(step), "top2_gap": float(first - second)})
    return {"rows": len(drawn), "max_relative_error": float(errors.max()), "partings": partings}


@click.command()
@click.option("--prompts", default=len(PROMPTS), type=click.IntRange(1, len(PROMPTS)))
@click.option("--tokens", default=64, type=click.IntRange(1))
@click.option("--threads", default=1, type=click.IntRange(1), help="Of both sides; changes no bit of ours.")
@click.option("--json", "output", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
def main(prompts: int, tokens: int, threads: int, output: Path | None) -> None:
    """Compare and print; exit 1 if a row differs by over 1e-4 or the outputs part at a gap of 1e-3 or more."""
    import torch

    torch.set_num_threads(threads)
    context = provenance()  # before the run: the tree may move on meanwhile
    cache_dir = default_cache_dir(os.environ)
    loaded = open_model("smollm2", cache_dir=cache_dir)
    reference = reference_model(cache_dir / "files" / ALIASES["smollm2"].file_name)
    backend = cpu_backend(loaded, threads)
    started = time.monotonic()
    results = []
    for i, text in enumerate(PROMPTS[:prompts]):
        ids = loaded.tokenizer.encode(text)
        drawn, theirs = reference_greedy(reference, ids, tokens)
        result = compare(forced_logits(backend, loaded.program, ids, drawn), theirs, drawn)
        results.append({"prompt": text, "prompt_tokens": len(ids), **result})
        click.echo(f"{i + 1:3d}  {result['max_relative_error']:.2e}  partings {result['partings']}  {text[:50]!r}")
    backend.close()
    partings = [parting for result in results for parting in result["partings"]]
    summary = {
        **context,
        "model_digest": loaded.digest,
        "backend": {"isa": backend.isa, "threads": backend.threads, "kv": "float32"},
        "prompts": prompts,
        "rows": sum(result["rows"] for result in results),
        "equal_tokens": sum(result["rows"] - len(result["partings"]) for result in results),
        "partings": partings,
        "max_relative_error": max(result["max_relative_error"] for result in results),
        "seconds": round(time.monotonic() - started, 1),
        "results": results,
    }
    click.echo(json.dumps({key: value for key, value in summary.items() if key != "results"}, indent=1))
    if output is not None:
        output.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    wide_partings = [parting for parting in partings if parting["top2_gap"] >= PARTING_GAP]
    sys.exit(1 if wide_partings or summary["max_relative_error"] > 1e-4 else 0)


if __name__ == "__main__":
    main()
