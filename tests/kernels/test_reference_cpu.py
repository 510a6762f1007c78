"""The C kernels against the reference's chains, bit for bit: op by op, whole programs, every encoding and instruction set."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tiny_programs import GEOMETRY, GREEDY, Row, Weights, build_program, fill_kv, kv_bytes, make_batch, run_step

from relay.kernels.backend import Batch
from relay.kernels.cpu import library
from relay.kernels.cpu.backend import CpuBackend
from relay.kernels.probe import probe_digest
from relay.kernels.program import Buffer, Geometry, Op, Program
from relay.kernels.reference import arithmetic, attention, products
from relay.kernels.reference.backend import ReferenceBackend
from relay.kernels.reference.products import ChainProducts
from relay.kernels.weights import Encoding
from relay.protocol.sampling import SamplingParams

BLOCKS = 48
MakeCpu = Callable[[], CpuBackend]


@pytest.fixture(params=library.available())
def make_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCpu]:
    """Makes CpuBackends of one instruction set and closes them; for ``nofma`` the reference rounds twice too."""
    if request.param == "nofma":

        def rounded_twice(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):
                return np.asarray(np.multiply(a, b, dtype=np.float32) + c, np.float32)

        for module in (arithmetic, attention, products):
            monkeypatch.setattr(module, "fma", rounded_twice)
    made = []

    def make() -> CpuBackend:
        made.append(CpuBackend(2, request.param, max_tokens=400, max_sampled=8))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def load_both(
    make_cpu: MakeCpu, program: Program, weights: Weights, dtype: str = "float32"
) -> tuple[CpuBackend, ReferenceBackend]:
    cpu, reference = make_cpu(), ReferenceBackend(ChainProducts())
    for backend in (cpu, reference):
        backend.load(program, weights)
        backend.allocate_kv(BLOCKS, 16, dtype)
        if dtype == "float32":
            fill_kv(backend, program, range(BLOCKS), 16, float("nan"))
        for slot in range(4):
            backend.bind_slot(slot, GREEDY, 0, [slot + 1], [])
    return cpu, reference


def written(op: Op) -> Buffer | None:
    """The buffer ``op`` changes; None for those that change only the cache."""
    fixed = {"HeadNorm": Buffer.QKV, "RopeWriteKv": Buffer.QKV, "Attend": Buffer.A, "SiluMul": Buffer.U}
    return fixed.get(type(op).__name__, getattr(op, "dst", None))


def compare_ops(cpu: CpuBackend, reference: ReferenceBackend, program: Program, batch: Batch) -> None:
    for index, op in enumerate(program.ops):
        cpu.run(index, index + 1, batch)
        reference.run(index, index + 1, batch)
        buffer = written(op)
        expected = reference._buffers[buffer]
        actual = cpu._buffers[buffer][: expected.shape[0], : expected.shape[1]]
        assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32)), f"op {index}: {op}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_every_op_has_equal_bits(make_cpu: MakeCpu, encoding: Encoding, dtype: str) -> None:
    program = build_program()
    cpu, reference = load_both(make_cpu, program, Weights(program, encoding), dtype)
    generator = np.random.default_rng(1)
    tables = [[7, 3, 9, 1, 20, 8], [30, 31], [40]]
    tokens = [generator.integers(0, GEOMETRY.vocab, 90).tolist() for _ in range(3)]
    steps = [
        [Row(0, tokens[0][:70], 0, tables[0], sample=False), Row(1, tokens[1][:5], 0, tables[1])],
        [
            Row(1, [-1], 5, tables[1]),
            Row(0, tokens[0][70:], 70, tables[0]),
            Row(2, tokens[2][:16], 0, tables[2], sample=False),
        ],
        [Row(2, tokens[2][16:17], 16, [40, 41]), Row(0, [-1], 90, tables[0]), Row(1, [-1], 6, tables[1])],
    ]
    for rows in steps:
        batch = make_batch(rows)
        compare_ops(cpu, reference, program, batch)
        assert cpu.sample(batch) == reference.sample(batch)
        assert np.array_equal(cpu.logits(), reference.logits())
    assert kv_bytes(cpu, program, tables[0], 0, 91) == kv_bytes(reference, program, tables[0], 0, 91)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "hidden"), [(3, 1, 64, 96), (4, 4, 16, 64), (8, 1, 32, 32), (2, 1, 128, 160)]
)
def test_other_shapes_have_equal_bits(make_cpu: MakeCpu, heads: int, kv_heads: int, dim: int, hidden: int) -> None:
    """Group sizes 1, 2, 3, 8 and head dimensions 16..128, over tile and split edges, decoding after."""
    geometry = Geometry(1, hidden, 64, heads, kv_heads, dim, 70, 400)
    program = build_program(geometry, qk_norm=heads == 3, bias=heads == 8)
    cpu, reference = load_both(make_cpu, program, Weights(program))
    generator = np.random.default_rng(heads)
    tokens = generator.integers(0, 70, 323).tolist()
    table = generator.permutation(BLOCKS)[:22].tolist()
    for start, stop in ((250, 259), (259, 260), (260, 262), (316, 320), (320, 321), (321, 323)):
        if start in (250, 316):  # what lies before is written, not computed
            raw = generator.normal(size=(2, start, geometry.kv_width)).astype(np.float32).tobytes()
            for backend in (cpu, reference):
                backend.write_kv(0, np.array(table, np.int32), 0, start, memoryview(raw))
        compare_ops(cpu, reference, program, make_batch([Row(0, tokens[start:stop], start, table)]))


def test_kv_moves_between_the_backends(make_cpu: MakeCpu) -> None:
    program = build_program()
    weights = Weights(program, Encoding.Q8_0)
    cpu, reference = load_both(make_cpu, program, weights)
    tokens = np.random.default_rng(3).integers(0, GEOMETRY.vocab, 50).tolist()
    whole = run_step(cpu, program, [Row(0, tokens, 0, [4, 9, 2, 11])])
    run_step(reference, program, [Row(0, tokens[:37], 0, [5, 3, 1])])
    for layer in range(GEOMETRY.num_layers):
        raw = bytearray(37 * reference.kv_bytes_per_token_layer())
        reference.read_kv(layer, np.array([5, 3, 1], np.int32), 0, 37, memoryview(raw))
        cpu.write_kv(layer, np.array([20, 21, 22], np.int32), 0, 37, memoryview(raw))
    cpu.copy_block(21, 33)
    assert np.array_equal(run_step(cpu, program, [Row(1, tokens[37:], 37, [20, 33, 22, 40])]), whole)


def test_the_probe_gives_equal_digests(make_cpu: MakeCpu) -> None:
    for dtype in ("float32", "bfloat16"):
        assert probe_digest(make_cpu(), dtype) == probe_digest(ReferenceBackend(ChainProducts()), dtype)


def test_sampled_streams_are_equal(make_cpu: MakeCpu) -> None:
    program = build_program()
    cpu, reference = load_both(make_cpu, program, Weights(program))
    streams = []
    for backend in (cpu, reference):
        params = SamplingParams(
            max_tokens=9, temperature=25.0, top_k=60, top_p=0.95, repetition_penalty=1.2, logprobs=2, seed=2**63 + 5
        )
        backend.bind_slot(0, params, 1, [5, 6, 7], [])
        batch = make_batch([Row(0, [5, 6, 7], 0, [3, 8])])
        stream = []
        for position in range(3, 9):
            backend.run(0, len(program.ops), batch)
            stream += backend.sample(batch)
            batch = make_batch([Row(0, [-1], position, [3, 8])])
        streams.append(stream)
    assert streams[0] == streams[1]
    assert len({sampled.token_id for sampled in streams[0]}) > 1
