"""A pack of random bf16 weights in the shape of Llama-3.1-8B or SmolLM2-135M, written at the speed of memory.

``python -m benchmarks.gpu_pack FILE CACHE_DIR [--shape 8b|smollm2]``. The tokenizer is byte-level with made-up tokens above: a
prompt of text is a token a byte. The content digest is of the header alone (hashing 16 GB takes longer than all that is measured);
the pack is noted as read.
"""

import argparse
import json
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.gpu_shapes import LLAMA_8B, SMOLLM2
from relay.kernels.packing import packed_bytes
from relay.kernels.weights import Encoding
from relay.models.checked import remember
from relay.models.config import ModelConfig
from relay.models.layout import MatrixItem, weight_items
from relay.models.pack import (
    ALIGNMENT,
    MAGIC,
    MATRIX_ALIGNMENT,
    PREAMBLE_BYTES,
    TEXTS,
    TOKENIZER,
    VERSION,
    Entry,
    Header,
    Preamble,
    Texts,
    digest_of,
)
from relay.models.rope import rope_tables

SHAPES = {"8b": LLAMA_8B, "smollm2": SMOLLM2}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
LOGIT_SPREAD = 3.0  # of tied embeddings: at 1 / sqrt(hidden) every draw would be one of the whole vocabulary


def tokenizer_json(vocab: int) -> str:
    """A byte-level BPE without merges whose other tokens are words of their own."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(rest))]
    names = letters + [f"w{index}" for index in range(256, vocab)]
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": {name: index for index, name in enumerate(names)}, "merges": []},
        }
    )


def write(path: Path, config: ModelConfig) -> None:
    generator = np.random.default_rng(0)
    noise = generator.standard_normal(1 << 24, np.float32)
    entries: list[Entry] = []
    with open(path, "wb") as file:
        file.write(b"\0" * PREAMBLE_BYTES)

        def section(
            chunks: list[np.ndarray | bytes], name: str, kind: str, shape: tuple[int, ...], encoding: str
        ) -> None:
            alignment = MATRIX_ALIGNMENT if kind == "matrix" else ALIGNMENT
            file.write(b"\0" * (-file.tell() % alignment))
            start = file.tell()
            for chunk in chunks:
                file.write(chunk)
            entries.append(Entry(name, kind, start, file.tell() - start, shape, encoding))  # type: ignore[arg-type]

        for item in weight_items(config):
            if isinstance(item, MatrixItem):
                spread = LOGIT_SPREAD if config.tied_embeddings else item.k**0.5
                scale = np.float32(item.k**-0.5 * (spread if item.name == "embed" else 1))
                bits = ((noise * scale).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
                size = packed_bytes(item.n, item.k, Encoding.BF16)
                whole, left = divmod(size, bits.nbytes)
                offset = int(generator.integers(0, 1 << 20))
                chunks: list[np.ndarray | bytes] = [np.roll(bits, offset)] * whole
                section([*chunks, bits[: left // 2]], item.name, "matrix", (item.n, item.k), "BF16")
            else:
                values = generator.uniform(0.5, 1.5, item.size).astype(np.float32)
                section([values], item.name, "vector", values.shape, "F32")
        for name, table in zip(("rope.cos", "rope.sin"), rope_tables(config), strict=True):
            section([np.ascontiguousarray(table, np.float32)], name, "vector", table.shape, "F32")
        section([tokenizer_json(config.vocab).encode()], TOKENIZER, "text", (), "")
        section([msgspec.json.encode(Texts(CHAT_TEMPLATE, {}, {}), order="sorted")], TEXTS, "text", (), "")
        at = file.tell()
        header = msgspec.json.encode(Header(config, "native", tuple(entries)))
        file.write(header)
        digest = digest_of(header)
        file.seek(0)
        file.write(Preamble(MAGIC, VERSION, 0, at, len(header), at + len(header), digest, digest).encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("cache", type=Path, help="model cache, which notes the pack as read")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    arguments = parser.parse_args()
    write(arguments.file, SHAPES[arguments.shape])
    remember(arguments.file, arguments.cache)


if __name__ == "__main__":
    main()
