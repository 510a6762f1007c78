"""A small part of benchmarks/correctness.py: the packed GGUF gives the logits of transformers' own load of that GGUF."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from relay.models.store import LoadedModel

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = pytest.mark.peers

NUM_TOKENS = 8


def test_greedy_tokens_and_logits_equal_transformers(
    smollm2: LoadedModel, smollm2_gguf: Path, cpu_kernels: None
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.set_num_threads(1)  # spinning thread pools of torch starve everything else on a busy machine
    from correctness import PARTING_GAP, compare, cpu_backend, reference_greedy, reference_model
    from prompts import PROMPTS
    from teacher_forcing import forced_logits

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = reference_model(smollm2_gguf)
        backend = cpu_backend(smollm2, 1)
        for text in (PROMPTS[0], PROMPTS[5], PROMPTS[18], PROMPTS[-1]):
            ids = smollm2.tokenizer.encode(text)
            drawn, theirs = reference_greedy(reference, ids, NUM_TOKENS)
            ours = forced_logits(backend, smollm2.program, ids, drawn)
            result = compare(ours, theirs, drawn)
            assert result["max_relative_error"] <= 1e-4, (text, result)
            assert all(parting["top2_gap"] < PARTING_GAP for parting in result["partings"]), (text, result)
            assert not np.array_equal(ours[0], ours[1])
    backend.close()
