"""A GGUF file as a Checkpoint: llama, qwen2 and qwen3 architectures, blocks kept as they are where an encoding exists."""

from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import gguf
import numpy as np

from relay.errors import CorruptModelError
from relay.kernels.packing import MatrixSource, from_bf16, from_f16, from_f32, from_gguf
from relay.models.checkpoint import TokenizerFiles
from relay.models.config import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, ModelConfig, RopeConfig
from relay.models.gguf_tokenizer import tokenizer_files
from relay.models.layout import weight_items
from relay.models.rope import yarn_attention_factor

_VERSIONS = (2, 3)
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LAYER_PARTS = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "o_bias": "attn_output.bias",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_MODEL_PARTS = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
_FREQUENCIES = "rope_freqs.weight"


class _Truncated(ValueError):
    """The text says what is missing."""


def _check_start(path: Path) -> None:
    """Magic and version. Raises CorruptModelError; OSError as ``open``."""
    with open(path, "rb") as file:
        start = file.read(8)
    if start[:4] != b"GGUF":
        raise CorruptModelError(
            f"{path}: not a readable GGUF file ({'empty' if not start else 'it does not begin as one'})"
        )
    version = int.from_bytes(start[4:], "little")
    if version not in _VERSIONS:
        raise CorruptModelError(f"{path}: not a readable GGUF file (version {version}; 2 and 3 are served)")


class _Reader(gguf.GGUFReader):
    """The package's reader; checks that every tensor lies inside the file, so that a truncated one can be named."""

    _plain: np.ndarray

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        # The reader cuts hundreds of thousands of pieces; as plain arrays over the same mapping they cost a third.
        self._plain = np.asarray(mapped)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            name, dims, dtype, offset = (field.parts[i] for i in (1, 3, 4, 5))
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(dtype[0]))]
            count = 1
            for extent in dims.tolist():
                count *= extent
            end = start_offs + int(offset[0]) + count * size // block
            if end > len(self.data):
                raise _Truncated(
                    f"truncated: tensor {bytes(name).decode()} ends {end - len(self.data)} bytes after the end"
                )
        super()._build_tensors(start_offs, fields)


class GgufSource:
    """An opened GGUF file. Rows of q and k, which llama files store for another rotation, come back in their own order."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptModelError naming file and field or tensor."""
        self._path = path
        try:
            _check_start(path)
            self._reader = _Reader(path)
        except OSError as error:
            raise CorruptModelError(f"{path}: not a readable GGUF file ({error.strerror or error})") from error
        except _Truncated as error:
            raise CorruptModelError(f"{path}: not a readable GGUF file ({error})") from error
        except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
            # What the package stumbled over says nothing to whoever has a bad file.
            raise CorruptModelError(f"{path}: not a readable GGUF file (its header is truncated or damaged)") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = self._text("general.architecture")
        if self._architecture not in _ARCHITECTURES:
            self._refuse(f"general.architecture {self._architecture!r} is not served ({', '.join(_ARCHITECTURES)})")
        self._config = self._read_config()
        self._check_complete()
        self._tokenizer: TokenizerFiles | None = None

    @property
    def where(self) -> str:
        return str(self._path)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def tokenizer(self) -> TokenizerFiles:
        if self._tokenizer is None:
            self._tokenizer = tokenizer_files(self.value, str(self._path))
        return self._tokenizer

    def matrix(self, name: str) -> MatrixSource:
        tensor = self._tensors[_file_name(name)]
        shape = [int(extent) for extent in reversed(tensor.shape)]
        if len(shape) != 2:
            self._refuse(f"tensor {tensor.name} must be a matrix, not of shape {shape}")
        n, k = shape
        data = tensor.data.reshape(n, -1)
        order = self._row_order(name, n)
        if order is not None:
            data = data[order]
        match tensor.tensor_type:
            case gguf.GGMLQuantizationType.F32:
                return from_f32(data)
            case gguf.GGMLQuantizationType.F16:
                return from_f16(data)
            case gguf.GGMLQuantizationType.BF16:
                return from_bf16(np.ascontiguousarray(data).view(np.uint16))
            case gguf.GGMLQuantizationType.Q8_0 | gguf.GGMLQuantizationType.Q4_1:
                return from_gguf(tensor.tensor_type.name, data, n, k)
            case gguf.GGMLQuantizationType.Q4_0 if self._q4_0_fits(data):
                return from_gguf("Q4_0", data, n, k)
        return from_f32(self._dequantize(tensor, data).reshape(n, k))

    def vector(self, name: str) -> np.ndarray:
        tensor = self._tensors[_file_name(name)]
        values = self._dequantize(tensor, tensor.data).reshape(-1)
        order = self._row_order(name, len(values))
        return values if order is None else values[order]

    def value(self, key: str) -> Any:
        """The metadata value of ``key`` as Python objects, None if the file has none."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def _dequantize(self, tensor: Any, data: np.ndarray) -> np.ndarray:
        try:
            return np.ascontiguousarray(gguf.dequantize(data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            raise CorruptModelError(
                f"{self._path}: tensor {tensor.name}: {tensor.tensor_type.name} is not served"
            ) from error

    def _q4_0_fits(self, data: np.ndarray) -> bool:
        """Whether every -8 * scale is a finite float16."""
        scales = np.ascontiguousarray(data.reshape(-1, 18)[:, :2]).view(np.float16)
        return bool(np.all(np.abs(scales.astype(np.float32)) * 8 <= 65504))

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        """Where row i of the checkpoint lies in the file. llama files interleave the halves of each q and k head."""
        part = name.rsplit(".", 1)[-1]
        if self._architecture != "llama" or part not in ("q", "k", "q_bias", "k_bias"):
            return None
        heads = self._config.num_heads if part.startswith("q") else self._config.num_kv_heads
        half = self._config.head_dim // 2
        if rows != heads * half * 2:
            self._refuse(f"tensor {_file_name(name)} has {rows} rows, not {heads * half * 2}")
        return np.arange(rows).reshape(heads, half, 2).swapaxes(1, 2).reshape(-1)

    def _check_complete(self) -> None:
        needed = {_file_name(part) for item in weight_items(self._config) for part in item.parts}
        for name in sorted(needed - self._tensors.keys()):
            self._refuse(f"tensor {name} is missing")
        for name in sorted(self._tensors.keys() - needed - {_FREQUENCIES}):
            self._refuse(f"tensor {name} belongs to no {self._architecture} model this file describes")

    def _read_config(self) -> ModelConfig:
        if self._integer("expert_count", 0):
            self._refuse(f"{self._architecture}.expert_count: mixtures of experts are not served")
        hidden, heads = self._integer("embedding_length"), self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", hidden // heads if heads else 0)
        positions, layers = self._integer("context_length"), self._integer("block_count")
        if self._integer("attention.value_length", head_dim) != head_dim:
            self._refuse(f"{self._architecture}.attention.value_length differs from key_length: not served")
        if self._integer("rope.dimension_count", head_dim) != head_dim:
            self._refuse(f"{self._architecture}.rope.dimension_count is not the head's size {head_dim}: not served")
        window = self._integer("attention.sliding_window", 0)
        if 0 < window < positions:
            self._refuse(
                f"{self._architecture}.attention.sliding_window {window} is shorter than the context: not served"
            )
        kv_heads, intermediate = self._integer("attention.head_count_kv", heads), self._integer("feed_forward_length")
        sizes = {
            "hidden": hidden,
            "heads": heads,
            "kv heads": kv_heads,
            "head size": head_dim,
            "intermediate": intermediate,
        }
        too_large = max(sizes.values()) > MAX_SIZE or positions > MAX_POSITIONS or layers > MAX_LAYERS
        if min(*sizes.values(), positions, layers) <= 0 or too_large or heads % kv_heads or head_dim % 2:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            self._refuse(f"impossible sizes: {listed}, context {positions}, layers {layers}")
        if _MODEL_PARTS["embed"] not in self._tensors:
            self._refuse(f"tensor {_MODEL_PARTS['embed']} is missing")
        eos = [self.value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return ModelConfig(
            architecture=cast(Literal["llama", "qwen2", "qwen3"], self._architecture),
            vocab=int(self._tensors[_MODEL_PARTS["embed"]].shape[1]),
            hidden=hidden,
            intermediate=intermediate,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_eps=self._number("attention.layer_norm_rms_epsilon"),
            max_positions=positions,
            rope=self._rope(positions),
            tied_embeddings=_MODEL_PARTS["lm_head"] not in self._tensors,
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            eos_token_ids=tuple(dict.fromkeys(int(i) for i in eos if i is not None)),
            bos_token_id=self.value("tokenizer.ggml.bos_token_id"),
        )

    def _rope(self, positions: int) -> RopeConfig:
        theta = self._number("rope.freq_base", 10000.0)
        kind = self.value(f"{self._architecture}.rope.scaling.type") or "none"
        factors: tuple[float, ...] = ()
        if _FREQUENCIES in self._tensors:
            tensor = self._tensors[_FREQUENCIES]
            factors = tuple(float(x) for x in self._dequantize(tensor, tensor.data).reshape(-1))
        if kind == "none":
            return RopeConfig(theta, frequency_factors=factors)
        factor = self._number("rope.scaling.factor", 1.0)
        if kind == "linear":
            return RopeConfig(theta, "linear", factor, frequency_factors=factors)
        if kind == "yarn":
            original = self._integer("rope.scaling.original_context_length", positions)
            attention = self._number("rope.scaling.attn_factor", 1.0) * yarn_attention_factor(factor)
            return RopeConfig(
                theta,
                "yarn",
                factor,
                original_max_position=original,
                attention_factor=attention,
                frequency_factors=factors,
            )
        self._refuse(f"{self._architecture}.rope.scaling.type {kind!r} is not served (none, linear, yarn)")

    def _integer(self, key: str, default: int | None = None) -> int:
        return int(self._number(key, default))

    def _number(self, key: str, default: float | None = None) -> float:
        full = f"{self._architecture}.{key}"
        value = self.value(full)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(f"{full} {'is missing' if value is None else f'must be one number, not {value!r}'}")
        return value

    def _text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            self._refuse(f"{key} is missing")
        return value

    def _refuse(self, why: str) -> NoReturn:
        raise CorruptModelError(f"{self._path}: {why}")


def _file_name(part: str) -> str:
    if part in _MODEL_PARTS:
        return _MODEL_PARTS[part]
    _, layer, kind = part.split(".")
    return f"blk.{layer}.{_LAYER_PARTS[kind]}"
