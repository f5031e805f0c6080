"""The user's cache folder, and the source digest that keys its entries."""

import hashlib
import os
from pathlib import Path


def user_folder() -> Path:
    """The cache folder: SCALEJAX_CACHE, or "scalejax" in the user's cache folder."""
    if named := os.environ.get("SCALEJAX_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "scalejax"


def package_digest() -> str:
    """SHA-256 of every source file of scalejax (5 ms): a cache keyed by it is never stale."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
