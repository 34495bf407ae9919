"""`--data-cache-path`: sample orders kept on disk between runs.

The key is everything the arrays depend on, the content of the data included, so a stale hit is impossible. An entry
is a directory that appears by one rename: several ranks or jobs may build the same entry at once, one wins, and no
reader meets half of it. Nothing depends on the cache being shared: a rank that does not find an entry builds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

FORMAT = 1


class IndexCache:
    """A directory of array sets."""

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--data-cache-path {directory} cannot be created: {error}") from None

    def load_or_build(self, key: dict, build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The arrays stored under `key` (mapped, read-only), or those `build` returns, stored for next time."""
        text = json.dumps({"format": FORMAT, **key}, indent=1, sort_keys=True)
        entry = self.directory / hashlib.sha256(text.encode()).hexdigest()[:32]
        found = self._load(entry, text)
        if found is not None:
            return found
        arrays = build()
        self._store(entry, text, arrays)
        return arrays

    def _load(self, entry: Path, text: str) -> dict[str, np.ndarray] | None:
        if not entry.is_dir():
            return None
        if (entry / "key.json").read_text() != text:
            raise ValueError(f"{entry} holds another key than its name says; delete it")
        return {path.stem: np.load(path, mmap_mode="r") for path in sorted(entry.glob("*.npy"))}

    def _store(self, entry: Path, text: str, arrays: dict[str, np.ndarray]) -> None:
        temporary = Path(tempfile.mkdtemp(prefix="building-", dir=self.directory))
        try:
            for name, array in arrays.items():
                with open(temporary / f"{name}.npy", "wb") as file:
                    np.save(file, array)
                    file.flush()
                    os.fsync(file.fileno())
            (temporary / "key.json").write_text(text)
            temporary.chmod(0o755)
            os.rename(temporary, entry)
        except OSError:
            # Lost the race to a builder of the same entry: its arrays are the same. Anything else is a real error.
            if not entry.is_dir():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
