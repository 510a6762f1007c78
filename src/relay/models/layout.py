"""Which weights a model has: the pack's names, and the checkpoint tensors each is put together from."""

from dataclasses import dataclass

from relay.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class MatrixItem:
    """Packed matrix ``name`` [n, k]: the checkpoint matrices ``parts`` one below the other, ``rows`` outputs each."""

    name: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    k: int

    @property
    def n(self) -> int:
        return sum(self.rows)


@dataclass(frozen=True, slots=True)
class VectorItem:
    """Packed fp32 vector ``name``: the checkpoint vectors ``parts`` one after the other."""

    name: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)


Item = MatrixItem | VectorItem


def weight_items(config: ModelConfig) -> list[Item]:
    """All weights of ``config`` in the order they are used. RoPE tables are not among them: they come from no checkpoint."""
    items: list[Item] = [_matrix("embed", config.vocab, config.hidden)]
    for layer in range(config.num_layers):
        items += _layer_items(config, f"layers.{layer}.")
    items.append(_vector("final_norm", config.hidden))
    if not config.tied_embeddings:
        items.append(_matrix("lm_head", config.vocab, config.hidden))
    return items


def _layer_items(config: ModelConfig, name: str) -> list[Item]:
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    qkv_rows = (q_rows, kv_rows, kv_rows)
    items: list[Item] = [
        _vector(name + "attn_norm", config.hidden),
        MatrixItem(name + "qkv", (name + "q", name + "k", name + "v"), qkv_rows, config.hidden),
    ]
    if config.attention_bias:
        items.append(VectorItem(name + "qkv_bias", (name + "q_bias", name + "k_bias", name + "v_bias"), qkv_rows))
    if config.qk_norm:
        items += [_vector(name + "q_norm", config.head_dim), _vector(name + "k_norm", config.head_dim)]
    items.append(_matrix(name + "o", config.hidden, q_rows))
    if config.output_bias:
        items.append(_vector(name + "o_bias", config.hidden))
    return [
        *items,
        _vector(name + "mlp_norm", config.hidden),
        MatrixItem(name + "gate_up", (name + "gate", name + "up"), (config.intermediate,) * 2, config.hidden),
        _matrix(name + "down", config.hidden, config.intermediate),
    ]


def _matrix(name: str, n: int, k: int) -> MatrixItem:
    return MatrixItem(name, (name,), (n,), k)


def _vector(name: str, size: int) -> VectorItem:
    return VectorItem(name, (name,), (size,))
