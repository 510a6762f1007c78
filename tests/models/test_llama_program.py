"""The op records of each variant, and that every weight they name is in the layout and the other way round."""

import pytest
from tiny_models import config_json

from relay.kernels.program import Buffer, Embed, HeadNorm, Linear, RmsNorm, RopeWriteKv, SelectRows
from relay.models.hf_config import parse_config
from relay.models.layout import MatrixItem, weight_items
from relay.models.llama import build_program

VARIANTS = [
    config_json(),
    config_json(tie_word_embeddings=True),
    config_json(attention_bias=True),
    config_json("mistral"),
    config_json("qwen2"),
    config_json("qwen3", head_dim=32),
]


@pytest.mark.parametrize("raw", VARIANTS)
def test_program_and_layout_name_the_same_weights(raw: dict) -> None:
    config = parse_config(raw, {}, "")
    program = build_program(config)
    named = set()
    for op in program.ops:
        for field in ("weight", "bias", "q_weight", "k_weight"):
            if getattr(op, field, None) is not None:
                named.add(getattr(op, field))
    assert named == {item.name for item in weight_items(config)}


@pytest.mark.parametrize("raw", VARIANTS)
def test_linear_shapes_fit_the_buffers(raw: dict) -> None:
    config = parse_config(raw, {}, "")
    program = build_program(config)
    matrices = {item.name: item for item in weight_items(config) if isinstance(item, MatrixItem)}
    for op in program.ops:
        if isinstance(op, Linear):
            assert matrices[op.weight].n == program.geometry.width(op.dst)
            assert matrices[op.weight].k == program.geometry.width(op.src)


def test_order_of_a_qwen3_layer_and_the_end() -> None:
    program = build_program(parse_config(config_json("qwen3", num_hidden_layers=1), {}, ""))
    kinds = [type(op).__name__ for op in program.ops]
    assert kinds == [
        "Embed",
        "RmsNorm",
        "Linear",
        "HeadNorm",
        "RopeWriteKv",
        "Attend",
        "Linear",
        "RmsNorm",
        "Linear",
        "SiluMul",
        "Linear",
        "SelectRows",
        "RmsNorm",
        "Linear",
    ]
    assert program.sink_points == (5,)
    assert program.ops[-3:] == (
        SelectRows(Buffer.X, Buffer.S),
        RmsNorm(Buffer.S, Buffer.S, "final_norm", 1e-5),
        Linear(Buffer.S, Buffer.L, "lm_head"),
    )


def test_tied_models_use_the_embedding_twice() -> None:
    program = build_program(parse_config(config_json(tie_word_embeddings=True), {}, ""))
    assert program.ops[0] == Embed("embed")
    assert program.ops[-1] == Linear(Buffer.S, Buffer.L, "embed")


def test_residuals_accumulate() -> None:
    program = build_program(parse_config(config_json(), {}, ""))
    into_x = [op for op in program.ops if isinstance(op, Linear) and op.dst is Buffer.X]
    assert len(into_x) == 4
    assert all(op.accumulate for op in into_x)
    assert sum(isinstance(op, RopeWriteKv) for op in program.ops) == 2
    assert not any(isinstance(op, HeadNorm) for op in program.ops)
