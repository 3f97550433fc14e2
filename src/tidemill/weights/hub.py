"""Models on the Hugging Face Hub, through huggingface_hub.

Knows which files of a repository an engine needs and how to explain each way a download fails. Tokens, endpoints,
offline mode and the cache are huggingface_hub's own business (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.errors import ModelUnavailable, TidemillError
from tidemill.weights.location import ModelFiles, Progress, find_in_folder, part_name, whole_ggufs

if TYPE_CHECKING:
    from tqdm import tqdm

# Python files are fetched, not run: that takes --trust-remote-code.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
_ALL_BUT_WEIGHTS = tuple(pattern for pattern in _PATTERNS if pattern != "*.safetensors")
_PICKLES = "pytorch_model*.bin"
# Original-format copies of the same weights, and training leftovers.
_IGNORED = ("original/*", "consolidated*.safetensors", "onnx/*", "openvino/*", "checkpoint-*/*", "runs/*")


def fetch_from_hub(model: str, revision: str | None, on_progress: Progress | None = None) -> ModelFiles:
    """Downloads what is not cached yet of `org/name`, `org/name:file.gguf` or `org/name:Q4_K_M`."""
    repo, _, wanted = model.partition(":")
    try:
        if wanted:
            path = _download_gguf(repo, wanted, revision, on_progress)
            return ModelFiles("gguf", path, model, revision)
        return _download_repo(repo, model, revision, on_progress)
    except TidemillError:
        raise
    except Exception as error:
        raise _explained(repo, revision, error) from error


def fetch_without_weights(repo: str, revision: str | None) -> ModelFiles:
    """Downloads everything of a repository but its weights."""
    from huggingface_hub import snapshot_download

    try:
        patterns, ignored = list(_ALL_BUT_WEIGHTS), list(_IGNORED)
        folder = snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=ignored)
    except Exception as error:
        raise _explained(repo, revision, error) from error
    return ModelFiles("folder", Path(folder), repo, revision)


def _download_repo(repo: str, model: str, revision: str | None, on_progress: Progress | None) -> ModelFiles:
    from huggingface_hub import snapshot_download

    files = _list_files(repo, revision)
    patterns = list(_PATTERNS)
    if files is not None and not any(name.endswith(".safetensors") for name in files):
        ggufs = whole_ggufs(name for name in files if _is_model_gguf(name))
        if len(ggufs) == 1:
            path = _download_gguf(repo, ggufs[0], revision, on_progress)
            return ModelFiles("gguf", path, model, revision)
        if ggufs:
            raise ModelUnavailable(
                f"{repo} holds {len(ggufs)} GGUF files and one must be chosen",
                cause=f"found {', '.join(sorted(ggufs))}",
                fix=f"name one: {repo}:{_preferred(ggufs)}",
            )
        # Fetched only where nothing better is published: many repositories hold their weights in both formats.
        patterns.append(_PICKLES)
    folder = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=list(_IGNORED),
        tqdm_class=_bar(repo, on_progress),
    )
    return find_in_folder(Path(folder), model, revision)


def _download_gguf(repo: str, wanted: str, revision: str | None, on_progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    name = part_name(wanted if wanted.endswith(".gguf") else _by_quantisation(repo, wanted, revision), 1)
    bar = _bar(f"{repo}:{name}", on_progress)
    folder = snapshot_download(repo, revision=revision, allow_patterns=[part_name(name, "*")], tqdm_class=bar)
    path = Path(folder) / name
    if not path.is_file():
        raise ModelUnavailable(
            f"{repo} has no file {name}",
            cause="no file of that name is in the repository (or, offline, in the local cache)",
            fix=f"list its files: hf download {repo} --dry-run",
        )
    return path


def _by_quantisation(repo: str, tag: str, revision: str | None) -> str:
    """The file a tag like Q4_K_M means."""
    files = _list_files(repo, revision) or _cached_files(repo, revision)
    ggufs = whole_ggufs(name for name in files if _is_model_gguf(name))
    matches = [name for name in ggufs if tag.lower() in name.lower()]
    if len(matches) != 1:
        raise ModelUnavailable(
            f"'{tag}' names {'no' if not matches else 'more than one'} GGUF file of {repo}",
            cause=f"the repository holds {', '.join(ggufs) or 'no GGUF file'}",
            fix=f"name the file: {repo}:{(matches or ggufs or ['file.gguf'])[0]}",
        )
    return matches[0]


def _list_files(repo: str, revision: str | None) -> list[str] | None:
    """The repository's files; None where that cannot be asked, so that a cached copy can still answer."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        # One request without retries, unlike listing the tree: an unreachable hub is told in a second.
        siblings = HfApi().model_info(repo, revision=revision).siblings
        return [sibling.rfilename for sibling in siblings or ()]
    except OfflineModeIsEnabled:
        return None
    except Exception as error:
        if _is_unreachable(error):
            return None
        raise


def _cached_files(repo: str, revision: str | None) -> list[str]:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _is_model_gguf(name: str) -> bool:
    return name.endswith(".gguf") and not Path(name).name.startswith("mmproj")


def _preferred(ggufs: list[str]) -> str:
    return next((name for name in sorted(ggufs) if "q4_k_m" in name.lower()), sorted(ggufs)[0])


def _is_unreachable(error: BaseException) -> bool:
    # The hub library changed its HTTP library once and may again; every one of them has a TransportError.
    names = {kind.__name__ for kind in type(error).__mro__}
    return "TransportError" in names or isinstance(error, (ConnectionError, TimeoutError))


def _explained(repo: str, revision: str | None, error: Exception) -> ModelUnavailable:
    from huggingface_hub import constants, errors

    cause = _first_line(error)
    if isinstance(error, errors.GatedRepoError):
        return ModelUnavailable(
            f"{repo} is gated: its authors must grant you access",
            cause=cause,
            fix=f"accept the terms at {constants.ENDPOINT}/{repo}, then set HF_TOKEN or run: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelUnavailable(
            f"{repo} has no revision '{revision}'",
            cause=cause,
            fix="leave --revision out, or name a branch, tag or commit",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelUnavailable(
            f"{repo} does not exist on the hub, or is private",
            cause=cause,
            fix="check the spelling; for a private model set HF_TOKEN or run: hf auth login",
        )
    if constants.HF_HUB_OFFLINE:
        return ModelUnavailable(
            f"{repo} is not in the local cache, and HF_HUB_OFFLINE is set",
            cause=cause,
            fix=f"unset HF_HUB_OFFLINE, or on a machine with network: hf download {repo}",
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or _is_unreachable(error):
        return ModelUnavailable(
            f"the hub cannot be reached, and {repo} is not in the local cache",
            cause=_first_line(error.__cause__ or error),
            fix="check the network, HTTPS_PROXY or HF_ENDPOINT; or use a local path, or the alias smollm2",
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ModelUnavailable(
            f"the hub refused access to {repo} ({status})",
            cause=cause,
            fix="set HF_TOKEN to a token that may read this model, or run: hf auth login",
        )
    return ModelUnavailable(f"could not download {repo}", cause=cause, fix="run it again; the download resumes")


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:400]


def _bar(what: str, on_progress: Progress | None) -> type[tqdm[Any]] | None:
    """A tqdm class that reports bytes instead of drawing."""
    if on_progress is None:
        return None
    from tqdm import tqdm

    report = on_progress
    furthest = [0]

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            kwargs["disable"] = False
            kwargs["file"] = _Silent()
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            # Several bars count the same bytes (received, written): the furthest one is the truth.
            if self.unit == "B" and self.n > furthest[0]:
                furthest[0] = int(self.n)
                report(what, furthest[0], max(int(self.total or 0), furthest[0]))
            return drawn

    return Reporter


class _Silent:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None
