"""What is drawn from a seed: the same for the same seed, complete, and refused in words where it cannot be."""

from collections import Counter

import pytest

from relay.chaos.kinds import KINDS, MOMENTS
from relay.chaos.plan import Ground, choose_kinds, draw_plan
from relay.chaos.requests import draw_requests
from relay.chaos.settings import ChaosSettings
from relay.chaos.shapes import Shape, parse_shape
from relay.errors import UsageError


@pytest.mark.parametrize(
    ("text", "shape"), [("1P+2D", Shape(1, 2)), ("2p+2d", Shape(2, 2)), (" 3 ", Shape(0, 3)), ("1P+1D", Shape(1, 1))]
)
def test_shapes(text, shape):
    assert parse_shape(text) == shape
    assert parse_shape(shape.name) == shape


@pytest.mark.parametrize("text", ["", "0", "P+D", "0P+2D", "2P+0D", "1P2D", "1P+2D+3", "-1", "17", "9P+9D", "three"])
def test_shapes_that_are_none(text):
    with pytest.raises(UsageError, match="--shape"):
        parse_shape(text)


def test_a_plan_is_its_seeds_and_has_every_kind():
    shape = Ground(Shape(1, 2), gateways=2, netns=True, holders=True)
    plan = draw_plan(7, shape, 60, [])
    assert plan == draw_plan(7, shape, 60, [])
    assert plan != draw_plan(8, shape, 60, [])
    counts = Counter(fault.kind for fault in plan)
    assert set(counts) == set(KINDS)
    assert counts["kill_engine"] > counts["cut_kv"]
    assert {fault.moment for fault in plan} <= {"", *MOMENTS}
    assert all(fault.role in ("prefill", "decode") for fault in plan)


def test_a_plan_has_as_many_faults_as_asked_for():
    for count in (0, 1, 5, 22, 23, 100):
        assert len(draw_plan(1, Ground(Shape(2, 2)), count, [])) == count


def test_colocated_workers_have_no_kv_connections():
    plan = draw_plan(3, Ground(Shape(0, 3)), 80, [])
    assert not any(KINDS[fault.kind].target == "kv" for fault in plan)
    assert {fault.role for fault in plan} == {"both"}
    with pytest.raises(UsageError, match="no KV connections"):
        choose_kinds(["cut_kv"], Ground(Shape(0, 3)))


def test_kinds_can_be_chosen():
    assert {fault.kind for fault in draw_plan(1, Ground(Shape(1, 2)), 9, ["stop_both", "cut_kv"])} == {
        "stop_both",
        "cut_kv",
    }
    with pytest.raises(UsageError, match="explode"):
        choose_kinds(["kill_engine", "explode"], Ground(Shape(1, 2)))


def test_what_is_not_there_is_not_struck():
    plan = draw_plan(3, Ground(Shape(1, 2)), 80, [])
    assert not any(KINDS[fault.kind].target == "gateway" or KINDS[fault.kind].on_packets for fault in plan)
    with pytest.raises(UsageError, match="--gateways"):
        choose_kinds(["kill_engine", "stop_gateway"], Ground(Shape(1, 2), netns=True))
    with pytest.raises(UsageError, match="--netns"):
        choose_kinds(["loss_kv"], Ground(Shape(1, 2), gateways=2))


def test_requests_are_their_seeds_and_cover_the_parameters():
    requests = draw_requests(7, 200, "m")
    assert requests == draw_requests(7, 200, "m")
    assert requests != draw_requests(8, 200, "m")
    assert len({request.seed for request in requests}) == 200
    bodies = [request.body for request in requests]
    assert {body["temperature"] == 0 for body in bodies} == {True, False}
    for name in ("n", "stop", "logprobs", "ignore_eos", "min_tokens", "top_p", "min_p", "logit_bias"):
        assert any(name in body for body in bodies), name
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert any(name in body for body in bodies), name
    assert {request.path for request in requests} == {"/v1/completions", "/v1/chat/completions"}
    assert {request.stream for request in requests} == {True, False}
    prompts = [body.get("prompt") or body["messages"][0]["content"] for body in bodies]
    lengths = sorted(len(prompt.split()) for prompt in prompts)
    assert lengths[0] < 12
    assert lengths[-1] > 200
    starts = Counter(prompt[:100] for prompt in prompts if len(prompt) > 200)
    assert max(starts.values()) > 10  # shared prefixes


def test_what_a_transport_and_devices_leave_to_strike():
    settings = ChaosSettings(1, 1, (1,), (Shape(1, 2),), transport="shm", devices=("cuda:0",))
    ground = settings.ground(Shape(1, 2))
    assert "kill_holder" in choose_kinds([], ground)
    assert not any(KINDS[name].target == "kv" for name in choose_kinds([], ground))
    with pytest.raises(UsageError, match="cut_kv needs a --transport that can be TCP"):
        choose_kinds(["cut_kv"], ground)
    apart = ChaosSettings(1, 1, (1,), (Shape(1, 1),), transport="ipc", devices=("cuda:0", "cuda:1")).ground(Shape(1, 1))
    assert "cut_kv" in choose_kinds([], apart)
    assert "kill_holder" not in choose_kinds([], apart)
    with pytest.raises(UsageError, match="kill_holder needs --backend cuda and several workers on a GPU"):
        choose_kinds(["kill_holder"], apart)
