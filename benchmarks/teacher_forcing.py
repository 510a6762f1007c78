"""Logits of every next token of one sequence on a backend, with the tokens given: what correctness is judged by."""

import numpy as np

from relay.kernels.backend import Backend, Batch
from relay.kernels.program import Program
from relay.protocol.sampling import SamplingParams

BLOCK_SIZE = 16
_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def forced_logits(backend: Backend, program: Program, prompt: list[int], output: list[int]) -> np.ndarray:
    """fp32 [len(output), vocab]: row i is what token output[i] is drawn from, given prompt and output[:i].

    The prompt is one prefill step, every further token a decode step. ``backend`` is loaded and has KV blocks 0, 1, … for
    the whole sequence.
    """
    blocks = -(-(len(prompt) + len(output)) // BLOCK_SIZE)
    table = np.arange(blocks, dtype=np.int32)[None, :]
    backend.bind_slot(0, _GREEDY, 0, prompt, [])
    rows = []
    tokens, start = prompt, 0
    for token in output:
        batch = Batch(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(start, start + len(tokens), dtype=np.int32),
            row_starts=np.array([0, len(tokens)], np.int32),
            slots=np.array([0], np.int32),
            block_tables=table,
            sampled_rows=np.array([0], np.int32),
            capture_logits=True,
        )
        backend.run(0, len(program.ops), batch)
        backend.sample(batch)
        rows.append(backend.logits()[0])
        start += len(tokens)
        tokens = [token]
    backend.release_slot(0)
    return np.stack(rows)
