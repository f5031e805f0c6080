"""Where scalejax keeps what it can make again, and what tells that it must."""

import hashlib
import os
from pathlib import Path

import scalejax


def user_folder() -> Path:
    """Where programs are kept: SCALEJAX_CACHE, or "scalejax" in the user's cache folder."""
    if named := os.environ.get("SCALEJAX_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "scalejax"


def package_digest() -> str:
    """Of every source file of scalejax: cheap (5 ms), and no stale figure ever."""
    folder = Path(scalejax.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
