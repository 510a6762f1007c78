"""Orders of operators: who may give them, and what is made of them."""

import httpx
import pytest
from api_fakes import FakeGateway

HEADERS = {"x-relay-admin": "1"}


def test_orders_reach_the_gateway(client: httpx.Client, gateway: FakeGateway) -> None:
    for path, body in (
        ("drain", {"workers": ["a", "b"]}),
        ("restart", {"workers": ["a"]}),
        ("restart", {"rolling": True}),
    ):
        response = client.post(f"/admin/{path}", json=body, headers=HEADERS)
        assert (response.status_code, response.json()) == (202, {"status": "accepted"})
    assert gateway.leaving == [(["a", "b"], True, False), (["a"], False, False), ([], False, True)]


def test_the_gateways_reason_is_told(client: httpx.Client) -> None:
    response = client.post("/admin/drain", json={"workers": ["last"]}, headers=HEADERS)
    assert response.status_code == 409
    assert response.json()["error"]["message"] == "nobody would serve"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("drain", {}),
        ("drain", {"workers": ["a"], "rolling": True}),
        ("restart", {}),
        ("restart", {"workers": "a"}),
        ("restart", {"worker": ["a"]}),
    ],
)
def test_bad_orders(client: httpx.Client, gateway: FakeGateway, path: str, body: dict[str, object]) -> None:
    assert client.post(f"/admin/{path}", json=body, headers=HEADERS).status_code == 400
    assert client.post(f"/admin/{path}", content=b"{", headers=HEADERS).status_code == 400
    deep = b'{"z":' + b"[" * 50_000
    assert client.post(f"/admin/{path}", content=deep, headers=HEADERS).status_code == 400
    assert not gateway.leaving


@pytest.mark.parametrize(
    "headers", [{}, HEADERS | {"x-forwarded-for": "10.0.0.1"}, HEADERS | {"forwarded": "for=10.0.0.1"}]
)
def test_strangers_give_no_orders(client: httpx.Client, gateway: FakeGateway, headers: dict[str, str]) -> None:
    assert client.post("/admin/drain", json={"workers": ["a"]}, headers=headers).status_code == 403
    assert not gateway.leaving


def test_a_body_without_end_is_not_read(client: httpx.Client, gateway: FakeGateway) -> None:
    response = client.post("/admin/drain", content=b" " * (1 << 20), headers=HEADERS)
    assert response.status_code == 413
    assert not gateway.leaving
