"""Where workers go, what NVML tells of the machine, and the lines for what cannot work."""

from typing import Any

import pytest
from click.testing import CliRunner
from fake_nvml import GIB, FakeNvml, h200s

from relay.cli import devices as devices_command
from relay.cluster.nvml import detect
from relay.cluster.topology import Need, Topology, check, describe
from relay.config import ServeConfig, WorkerConfig
from relay.devices import RoleDevices, place
from relay.errors import DoesNotFitError, UsageError
from relay.local.workers import LocalWorkers
from relay.models.config import ModelConfig, RopeConfig

NEED = Need(weight_bytes=15 * GIB, kv_bytes=0, least_kv_bytes=GIB, utilization=0.9)
LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 8192, RopeConfig(5e5), tied_embeddings=False)
SPLIT = [("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]


def checked(
    placement: dict[str, tuple[str, ...]], topology: Topology, need: Need = NEED, transport: str = "auto"
) -> list[str]:
    """``check`` with the roles that workers' names have."""
    names = {"prefill": "prefill", "decode": "decode", "worker": "both"}
    roles = {worker: names[worker.partition("-")[0]] for worker in placement}
    return check(placement, roles, topology, need, transport)


def test_workers_take_the_list_of_their_role_in_turn() -> None:
    found = place(SPLIT, ("cuda:0",), RoleDevices(("cuda:3",), ("cuda:1", "cuda:2")))
    assert found == {"prefill-0": ("cuda:3",), "decode-0": ("cuda:1",), "decode-1": ("cuda:2",)}


def test_workers_without_a_list_share_the_common_one() -> None:
    assert list(place(SPLIT, ("cuda:0", "cuda:1"), RoleDevices()).values()) == [("cuda:0",), ("cuda:1",), ("cuda:0",)]
    mixed = place(SPLIT, ("cuda:0",), RoleDevices(decode=("cuda:1",)))
    assert mixed == {"prefill-0": ("cuda:0",), "decode-0": ("cuda:1",), "decode-1": ("cuda:1",)}


def test_ranks_are_neighbours_of_the_list() -> None:
    by_role = RoleDevices(("cuda:0", "cuda:1"), ("cuda:2", "cuda:3", "cuda:4", "cuda:5"), ranks=2)
    found = place(SPLIT, ("cuda:0",), by_role)
    assert found == {
        "prefill-0": ("cuda:0", "cuda:1"),
        "decode-0": ("cuda:2", "cuda:3"),
        "decode-1": ("cuda:4", "cuda:5"),
    }
    assert (by_role.num_workers(by_role.prefill), by_role.num_workers(by_role.decode)) == (1, 2)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prefill": ("cuda0",)}, "--prefill-devices must be cuda:N"),
        ({"decode": ("",)}, "--decode-devices must be cuda:N"),
        ({"decode": ("cuda:\u0662",)}, "--decode-devices must be cuda:N"),  # Arabic two
        ({"decode": ("cuda:01",)}, "--decode-devices must be cuda:N"),  # would be a second name of cuda:1
        ({"ranks": 9}, "--tensor-parallel-size must be between 1 and 8"),
        ({"decode": ("cuda:0", "cuda:1", "cuda:2"), "ranks": 2}, "names 3 devices, which is no multiple of the 2"),
        ({"decode": ("cuda:0", "cuda:0"), "ranks": 2}, "each rank of --tensor-parallel-size needs a device"),
    ],
)
def test_lists_that_mean_nothing(values: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RoleDevices(**values)  # type: ignore[arg-type]


def test_device_lists_need_a_backend_with_devices() -> None:
    with pytest.raises(UsageError, match="need --backend cuda, not cpu"):
        WorkerConfig.of("cpu", by_role=RoleDevices(("cuda:0",)))


def test_ranks_quantise_their_own_parts() -> None:
    by_role = RoleDevices(decode=("cuda:0", "cuda:1"), prefill=("cuda:2", "cuda:3"), ranks=2)
    config = WorkerConfig.of("cuda", quantization="int8", by_role=by_role)
    workers = LocalWorkers(config, "pack", "digest", lambda name, line: None, slots=SPLIT[:2])  # type: ignore[arg-type]
    for worker, role in SPLIT[:2]:
        spec = workers._spec(_key(worker), role)  # type: ignore[arg-type]
        assert (spec.ranks, spec.quantization, spec.weights_socket) == (2, "int8", "")


def test_each_worker_is_told_its_own_device() -> None:
    config = WorkerConfig.of("cuda", by_role=RoleDevices(("cuda:0",), ("cuda:1", "cuda:1")))
    workers = LocalWorkers(config, "pack", "digest", lambda name, line: None, slots=SPLIT)  # type: ignore[arg-type]
    specs = {worker: workers._spec(_key(worker), role) for worker, role in SPLIT}  # type: ignore[arg-type]
    assert [(spec.device, spec.gpu_sharers) for spec in specs.values()] == [("cuda:0", 1), ("cuda:1", 2), ("cuda:1", 2)]
    assert not specs["prefill-0"].weights_socket
    assert specs["decode-0"].weights_socket == specs["decode-1"].weights_socket != ""


def test_int8_weights_are_shared_as_any_others() -> None:
    config = WorkerConfig.of("cuda", quantization="int8")
    workers = LocalWorkers(config, "pack", "digest", lambda name, line: None, slots=SPLIT)  # type: ignore[arg-type]
    specs = [workers._spec(_key(worker), role) for worker, role in SPLIT]  # type: ignore[arg-type]
    assert len({spec.weights_socket for spec in specs}) == 1
    assert specs[0].weights_socket
    assert {(spec.quantization, spec.gpu_sharers) for spec in specs} == {("int8", 3)}


def _key(worker: str) -> object:
    from relay.ids import WorkerKey

    return WorkerKey(worker, 1)


def test_the_topology_is_read_and_nvml_closed_again() -> None:
    nvml = h200s(2)
    topology = detect({}, nvml)
    assert nvml.opened == 0
    assert describe(topology) == [
        "cuda:0 NVIDIA H200, 140.0 GiB, 139.0 free",
        "cuda:1 NVIDIA H200, 140.0 GiB, 139.0 free",
        "cuda:0 - cuda:1: 18 NVLinks, one NUMA node, peer access",
    ]


def test_visible_devices_are_renumbered() -> None:
    nvml = FakeNvml([1 * GIB, 2 * GIB, 3 * GIB], [0, 0, 0])
    assert [gpu.total_bytes // GIB for gpu in detect({"CUDA_VISIBLE_DEVICES": "2,0"}, nvml).gpus] == [3, 1]
    assert [gpu.total_bytes // GIB for gpu in detect({"CUDA_VISIBLE_DEVICES": "GPU-b"}, nvml).gpus] == [2]
    assert detect({"CUDA_VISIBLE_DEVICES": ""}, nvml).gpus == ()
    assert (
        "\u0661 names what NVML does not list" in detect({"CUDA_VISIBLE_DEVICES": "\u0661"}, nvml).problem
    )  # Arabic one
    assert "MIG-x names what NVML does not list" in detect({"CUDA_VISIBLE_DEVICES": "MIG-x"}, nvml).problem


def test_what_cannot_be_asked_is_said_and_refuses_nothing() -> None:
    topology = detect({}, h200s(2, broken="Driver Not Loaded"))
    assert describe(topology) == ["not detected: NVML: Driver Not Loaded"]
    assert checked({"decode-0": ("cuda:9",)}, topology) == []


def test_the_module_has_what_the_fake_has() -> None:
    """The fake would prove nothing if it spelled a name as pynvml does not."""
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert pynvml.NVML_P2P_STATUS_OK == 0


def test_a_device_that_does_not_exist() -> None:
    line = (
        r"cuda:2 for decode-0 does not exist: this machine has cuda:0 \(NVIDIA H200\), cuda:1 \(NVIDIA H200\); name one"
    )
    with pytest.raises(UsageError, match=line):
        checked({"prefill-0": ("cuda:0",), "decode-0": ("cuda:2",)}, detect({}, h200s(2)))
    with pytest.raises(UsageError, match="NVML finds no GPU"):
        checked({"decode-0": ("cuda:0",)}, detect({}, h200s(0)))


def test_two_workers_on_one_device_without_room() -> None:
    topology = detect({}, FakeNvml([24 * GIB, 24 * GIB], [23 * GIB, 23 * GIB]))
    apart = {"prefill-0": ("cuda:0",), "decode-0": ("cuda:1",)}
    assert checked(apart, topology) == []  # 15 + 2 + 1 of 21.6
    together = {"prefill-0": ("cuda:0",), "decode-0": ("cuda:0",)}
    assert checked(together, topology) == []  # weights once: 15 + 2 x 3 of 21.6
    crowded = {**together, "decode-1": ("cuda:0",)}
    with pytest.raises(DoesNotFitError) as refusal:
        checked(crowded, topology)
    text = str(refusal.value)
    assert (
        "prefill-0 and decode-0 and decode-1 do not fit on cuda:0 (NVIDIA H200): 15.0 GiB of weights and 3 x 3.0"
        in text
    )
    assert "21.6 of 24.0 GiB may be used (23.0 free" in text
    assert "--prefill-devices, --decode-devices" in text
    with pytest.raises(DoesNotFitError, match="decode-0 does not fit"):
        checked({"decode-0": ("cuda:0",)}, detect({}, FakeNvml([140 * GIB], [4 * GIB])))


def test_no_peer_access_is_said_between_workers_and_refused_between_ranks() -> None:
    nvml = h200s(2, pairs={(0, 1): ("CHIPSET_NOT_SUPPORTED", "CHIPSET_NOT_SUPPORTED", "NOT_SUPPORTED")}, ancestor=50)
    topology = detect({}, nvml)
    (note,) = checked({"prefill-0": ("cuda:0",), "decode-0": ("cuda:1",)}, topology)
    assert note.startswith("no peer access between cuda:0 (prefill-0) and cuda:1 (decode-0): across CPUs, the chipset")
    assert "host memory" in note
    with pytest.raises(
        UsageError, match=r"worker-0: no peer access between cuda:0 and cuda:1 \(across CPUs; the chipset"
    ):
        checked({"worker-0": ("cuda:0", "cuda:1")}, topology)
    with pytest.raises(UsageError, match="a device of a tensor-parallel worker is that worker's alone"):
        checked({"worker-0": ("cuda:0", "cuda:1"), "worker-1": ("cuda:1", "cuda:0")}, detect({}, h200s(2)))


UNCONNECTED = ("CHIPSET_NOT_SUPPORTED", "CHIPSET_NOT_SUPPORTED", "NOT_SUPPORTED")


def test_ipc_by_name_needs_peers_where_kv_goes() -> None:
    nvml = h200s(3, pairs={(0, 1): UNCONNECTED}, ancestor=50)
    split = {"prefill-0": ("cuda:0",), "decode-0": ("cuda:1",)}
    with pytest.raises(UsageError) as refusal:
        checked(split, detect({}, nvml), transport="ipc")
    assert str(refusal.value) == (
        "--transport ipc: no peer access between cuda:0 (prefill-0) and cuda:1 (decode-0): across CPUs, the chipset does not "
        "support it; serve with --transport auto or shm, or choose devices that are peers (`relay devices` lists them)"
    )
    assert checked(split, detect({}, h200s(2)), transport="ipc") == []
    assert checked({"prefill-0": ("cuda:0",), "decode-0": ("cuda:0",)}, detect({}, nvml), transport="ipc") == []
    apart = {"prefill-0": ("cuda:2",), "decode-0": ("cuda:0",), "decode-1": ("cuda:1",)}
    assert checked(apart, detect({}, nvml), transport="ipc") == []
    with pytest.raises(UsageError, match=r"cuda:2 \(prefill-0\) and cuda:1 \(decode-1\)"):
        checked(apart, detect({}, h200s(3, pairs={(1, 2): UNCONNECTED})), transport="ipc")


def test_the_transport_that_was_asked_for_is_checked() -> None:
    topology = detect({}, h200s(2, pairs={(0, 1): UNCONNECTED}))
    by_role = RoleDevices(("cuda:0",), ("cuda:1",))
    config = ServeConfig(model="m", worker=WorkerConfig.of("cuda", by_role=by_role, transport="ipc"))
    with pytest.raises(UsageError, match="--transport ipc: no peer access"):
        devices_command.device_lines(config, LLAMA_8B, topology)


def test_host_memory_is_said_of_a_p_and_a_d_alone() -> None:
    nowhere = detect({}, h200s(4, pairs={(low, high): UNCONNECTED for high in range(4) for low in range(high)}))
    assert checked({"worker-0": ("cuda:0",), "worker-1": ("cuda:1",)}, nowhere) == []
    assert checked({"worker-0": ("cuda:0",), "worker-1": ("cuda:1",)}, nowhere, transport="ipc") == []
    notes = checked({"prefill-0": ("cuda:0",), "decode-0": ("cuda:1",), "decode-1": ("cuda:2",)}, nowhere)
    assert [note.partition("): ")[0] for note in notes] == [
        "no peer access between cuda:0 (prefill-0) and cuda:1 (decode-0",
        "no peer access between cuda:0 (prefill-0) and cuda:2 (decode-1",
    ]
    crossed = {"prefill-0": ("cuda:0",), "prefill-1": ("cuda:1",), "decode-0": ("cuda:1",), "decode-1": ("cuda:0",)}
    assert len(checked(crossed, nowhere)) == 1, "one line for two devices"


def test_of_ranks_the_first_moves_the_kv() -> None:
    placement = {"prefill-0": ("cuda:0", "cuda:1"), "decode-0": ("cuda:2", "cuda:3")}
    others = {(0, 3): UNCONNECTED, (1, 2): UNCONNECTED, (1, 3): UNCONNECTED}
    assert checked(placement, detect({}, h200s(4, pairs=others)), transport="ipc") == []
    assert len(checked(placement, detect({}, h200s(4, pairs={(0, 2): UNCONNECTED})))) == 1


def test_every_two_ranks_must_be_peers() -> None:
    topology = detect({}, h200s(3, pairs={(0, 2): UNCONNECTED}))
    with pytest.raises(UsageError, match="worker-0: no peer access between cuda:0 and cuda:2"):
        checked({"worker-0": ("cuda:0", "cuda:1", "cuda:2")}, topology)


@pytest.mark.parametrize("kind", ["READ", "WRITE"])
def test_peers_read_and_write(kind: str) -> None:
    statuses = ("DISABLED_BY_REGKEY", "OK", "OK") if kind == "READ" else ("OK", "DISABLED_BY_REGKEY", "OK")
    link = detect({}, h200s(2, pairs={(0, 1): statuses})).links[0, 1]
    assert (link.peers, link.reason) == (False, "the driver's settings forbid it")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("scarce", ["total", "free"])
@pytest.mark.parametrize("given", [0, 3 * GIB])
def test_room_is_counted_to_the_byte(workers: int, scarce: str, given: int) -> None:
    need = Need(weight_bytes=15 * GIB, kv_bytes=given, least_kv_bytes=GIB, utilization=0.5)
    needed = 15 * GIB + workers * (2 * GIB + (given or GIB))
    placement = {f"worker-{index}": ("cuda:0",) for index in range(workers)}

    def gpu(allowed: int) -> Topology:
        total, free = (2 * allowed, 2 * allowed) if scarce == "total" else (80 * GIB, allowed)
        return detect({}, FakeNvml([total], [free]))

    assert checked(placement, gpu(needed), need) == []
    with pytest.raises(DoesNotFitError):
        checked(placement, gpu(needed - 1), need)


def test_the_longest_sequence_needs_room() -> None:
    def need(ranks: int, **values: Any) -> Need:
        devices = tuple(f"cuda:{rank}" for rank in range(ranks))
        worker = WorkerConfig.of("cuda", by_role=RoleDevices(decode=devices, ranks=ranks), **values)
        return devices_command.need_of(ServeConfig(model="m", prefill=0, worker=worker), LLAMA_8B)

    token = 2 * 32 * 8 * 128 * 2  # K and V of each layer, head and dimension, in 16 bits
    assert need(1).least_kv_bytes == 64 * token  # one block
    assert need(1, max_model_len=8192).least_kv_bytes == 8192 * token == GIB
    assert need(2, max_model_len=8192).least_kv_bytes == GIB // 2
    assert need(2, kv_cache_memory_bytes=GIB).kv_bytes == GIB // 2
    worker = WorkerConfig.of("cuda", max_model_len=8192, gpu_memory_utilization=1.0)
    config = ServeConfig(model="m", prefill=0, worker=worker)
    room = devices_command.need_of(config, LLAMA_8B).weight_bytes + 2 * GIB
    with pytest.raises(DoesNotFitError, match=r"3\.0 GiB for KV and overhead"):
        devices_command.device_lines(config, LLAMA_8B, detect({}, FakeNvml([80 * GIB], [room + GIB - 1])))
    assert devices_command.device_lines(config, LLAMA_8B, detect({}, FakeNvml([80 * GIB], [room + GIB])))


def test_the_banner_says_devices_and_placement() -> None:
    model = LLAMA_8B
    by_role = RoleDevices(("cuda:0",), ("cuda:1",))
    config = ServeConfig(model="m", worker=WorkerConfig.of("cuda", by_role=by_role))
    lines = devices_command.device_lines(config, model, detect({}, h200s(2)))
    assert lines[-1] == "prefill-0 on cuda:0, decode-0 on cuda:1"
    noted = devices_command.device_lines(config, model, detect({}, h200s(2, pairs={(0, 1): UNCONNECTED})))
    assert noted[-2] == lines[-1]
    assert noted[-1].startswith("no peer access between cuda:0 (prefill-0) and cuda:1 (decode-0)")
    assert 14.9 < devices_command.need_of(config, model).weight_bytes / GIB < 15.0  # 8.03 billion weights of 2 bytes
    halved = ServeConfig(model="m", worker=WorkerConfig.of("cuda", by_role=by_role, quantization="int8"))
    assert 7.9 < devices_command.need_of(halved, model).weight_bytes / GIB < 8.0  # the embedding stays as it is
    two = RoleDevices(("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"), ranks=2)
    ranks = ServeConfig(model="m", worker=WorkerConfig.of("cuda", by_role=two))
    assert 7.9 < devices_command.need_of(ranks, model).weight_bytes / GIB < 8.0
    small = detect({}, FakeNvml([16 * GIB] * 2, [16 * GIB] * 2))
    with pytest.raises(DoesNotFitError, match=r"prefill-0 does not fit on cuda:0 .* 15\.0 GiB of weights"):
        devices_command.device_lines(config, model, small)


def test_the_command_prints_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_command, "detect", lambda environment: detect({}, h200s(2)))
    result = CliRunner().invoke(devices_command.devices, ["--json"])
    assert '"devices": [0, 1]' in result.output
    assert '"problem": ""' in result.output
    monkeypatch.setattr(devices_command, "detect", lambda environment: Topology(problem="no driver"))
    assert CliRunner().invoke(devices_command.devices, standalone_mode=False).return_value == 1
