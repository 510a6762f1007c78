import pytest

from relay.errors import UsageError
from relay.worker.spec import WorkerSpec, decode_spec, encode_spec, parse_address

SPEC = WorkerSpec(worker="p0", incarnation=3, gateways=["tcp://127.0.0.1:9"], pack_path="/m.pack", role="prefill")


def test_spec_survives_json_text_and_file(tmp_path):
    assert decode_spec(encode_spec(SPEC)) == SPEC
    path = tmp_path / "spec.json"
    path.write_text(encode_spec(SPEC))
    assert decode_spec(str(path)) == SPEC


@pytest.mark.parametrize("text", ["{}", '{"worker": 1}', "/no/such/file", encode_spec(SPEC)[:-1] + ',"colour":1}'])
def test_bad_spec_is_a_usage_error(text):
    with pytest.raises(UsageError, match="bad worker spec"):
        decode_spec(text)


def test_addresses():
    assert parse_address("tcp://127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse_address("tcp://[::1]:80") == ("::1", 80)
    for bad in ("127.0.0.1:80", "tcp://:80", "tcp://h:", "tcp://h:99999", "unix://x:1"):
        with pytest.raises(UsageError):
            parse_address(bad)
