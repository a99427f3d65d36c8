"""Model stores of other programs, in the home directory of a test."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.helpers.fetch import sha256

#: What Ollama stores beside a model, which specgen does not read.
_TEMPLATE = b"{{ .Prompt }}"


class Stores:
    """Adds models to the stores in a home directory."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def add_to_ollama(
        self,
        name: str,
        content: bytes,
        *,
        folder: Path | None = None,
        adapter: bytes | None = None,
    ) -> Path:
        """Add a model as HOST/NAMESPACE/MODEL:TAG, as `ollama pull` does; return its blob."""
        models = folder or self.home / ".ollama" / "models"
        layers = [self._layer(models, "model", content), self._layer(models, "template", _TEMPLATE)]
        if adapter is not None:
            layers.append(self._layer(models, "adapter", adapter))
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"mediaType": "application/vnd.docker.container.image.v1+json"},
            "layers": layers,
        }
        path, _, tag = name.partition(":")
        write(models / "manifests" / path / tag, json.dumps(manifest).encode())
        return models / "blobs" / f"sha256-{sha256(content)}"

    def _layer(self, models: Path, kind: str, content: bytes) -> dict[str, object]:
        digest = sha256(content)
        write(models / "blobs" / f"sha256-{digest}", content)
        return {
            "mediaType": f"application/vnd.ollama.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(content),
        }

    def add_to_lm_studio(self, name: str, content: bytes, home: str = ".lmstudio") -> Path:
        """Add a file as USER/REPO/FILE to the folder of models in LM Studio's own folder."""
        return write(self.home / home / "models" / name, content)

    def add_to_llama_cpp(self, repo: str, tag: str, file: str, content: bytes) -> Path:
        """Add a model as `llama-cli -hf REPO:TAG` did before llama.cpp used the hub's layout."""
        folder = Path(os.environ["XDG_CACHE_HOME"]) / "llama.cpp"
        manifest = {"ggufFile": {"rfilename": file, "size": len(content)}}
        name = f"manifest={repo.replace('/', '=')}={tag}.json"
        write(folder / name, json.dumps(manifest).encode())
        return write(folder / f"{repo}_{file}".replace("/", "_"), content)

    def add_to_jan(self, model_id: str, content: bytes) -> Path:
        """Add a model with Jan's description of it."""
        data = self.home / ".local" / "share" / "Jan" / "data"
        relative_path = f"llamacpp/models/{model_id}/model.gguf"
        description = f"model_path: {relative_path}\nname: {model_id}\nsize_bytes: {len(content)}\n"
        write(data / "llamacpp" / "models" / model_id / "model.yml", description.encode())
        return write(data / relative_path, content)

    def add_to_gpt4all(self, name: str, content: bytes) -> Path:
        """Add a file to GPT4All's folder."""
        return write(self.home / ".local" / "share" / "nomic.ai" / "GPT4All" / name, content)

    def state(self) -> dict[str, tuple[int, int]]:
        """The time and the size of every file and folder in the home directory."""
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in self.home.rglob("*")
        }


def write(path: Path, content: bytes) -> Path:
    """Write a file, and make the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
