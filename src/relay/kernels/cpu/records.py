"""The structs of program.h, field by field."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import ClassVar

from relay.kernels.program import Buffer


class OpKind(IntEnum):
    """``kind`` of an ``Op``."""

    EMBED = 0
    RMS_NORM = 1
    LINEAR = 2
    HEAD_NORM = 3
    ROPE_WRITE_KV = 4
    ATTEND = 5
    SILU_MUL = 6
    SELECT_ROWS = 7


BUFFER_INDEX = {buffer: index for index, buffer in enumerate(Buffer)}

ERRORS = {
    1: "a token id outside the vocabulary",
    2: "positions that do not ascend or lie past the rotary table",
    3: "a block table that does not cover its row, or a block outside the cache",
    4: "rows, slots or sampled rows that do not fit together",
    5: "no memory for the attention's task list",
}


class BufferRecord(ctypes.Structure):
    _fields_: ClassVar = [("data", c_void_p), ("stride", c_int64)]


class Op(ctypes.Structure):
    _fields_: ClassVar = [
        ("kind", c_int32),
        ("src", c_int32),
        ("dst", c_int32),
        ("encoding", c_int32),
        ("accumulate", c_int32),
        ("layer", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("vector", c_void_p),
        ("vector2", c_void_p),
        ("eps", c_float),
        ("log2_scale", c_float),
    ]


class Model(ctypes.Structure):
    _fields_: ClassVar = [
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("max_positions", c_int32),
        ("num_layers", c_int32),
        ("buffers", BufferRecord * len(Buffer)),
        ("rope_cos", c_void_p),
        ("rope_sin", c_void_p),
        ("kv", c_void_p),
        ("block_bytes", c_int64),
        ("layer_bytes", c_int64),
        ("block_size", c_int32),
        ("num_blocks", c_int32),
        ("kv_half", c_int32),
        ("num_slots", c_int32),
        ("last_tokens", c_void_p),
        ("pool", c_void_p),
        ("scratch", c_void_p),
        ("scratch_floats", c_int64),
        ("plan", c_void_p),
        ("planned", c_int32),
    ]


class Batch(ctypes.Structure):
    _fields_: ClassVar = [
        ("tokens", c_int32),
        ("rows", c_int32),
        ("sampled", c_int32),
        ("max_blocks", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("row_starts", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("sampled_rows", c_void_p),
    ]
