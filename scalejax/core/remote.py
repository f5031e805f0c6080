"""Bytes of files at URLs: ranges of one version of a file, with retries and deadlines.

HTTP, S3 and Google Cloud Storage are asked for the version that was listed; other stores of
`fsspec` state their version before each read. Transient errors (no connection, silence, resets,
short answers, 408, 429, 5xx) are retried until a deadline; others end at once, in one line.

Does not use pyarrow's file systems, which can neither ask for a version of a file nor say which one
they received. Does not know the contents of files.
"""

import asyncio
import email.utils
import math
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

from scalejax.core.errors import ConfigError, Unavailable, refusal, shortened

T = TypeVar("T")

STORE_SECONDS, STALL_SECONDS = "SCALEJAX_STORE_SECONDS", "SCALEJAX_STORE_STALL_SECONDS"
"""Variables: how long a read is retried; longest silence of a store within one try."""
MOST_IGNORED_BYTES = 2**24
"""Largest file that is read whole from a server that ignores ranges."""
_AT_ONCE = 48
"""Requests in flight for one read."""
_SLOWEST_BYTES_PER_SECOND = 100_000
"""Rate below which a try is abandoned, for stores that show no progress (assumed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long to wait for a store."""

    connect_seconds: float = 10.0
    """Longest time to connect."""
    stall_seconds: float = 30.0
    """Longest silence within a try."""
    total_seconds: float = 300.0
    """How long a read of a listed file is retried."""
    first_seconds: float = 60.0
    """The same for a file not seen before, whose address may be wrong; a listing in progress may
    take `total_seconds`."""
    gone_seconds: float = 5.0
    """Least time before a file that was listed, but is not found, counts as gone."""
    first_wait_seconds: float = 0.5
    """Longest wait before the second try; doubled for each further try."""
    longest_wait_seconds: float = 30.0
    """Longest wait between two tries, unless the store asks for a longer one."""


def deadlines() -> Deadlines:
    """The deadlines set by the environment.

    Raises:
        ConfigError: if a variable is not a positive number.
    """
    total_seconds = _seconds_of(STORE_SECONDS, Deadlines().total_seconds)
    stall_seconds = _seconds_of(STALL_SECONDS, Deadlines().stall_seconds)
    return Deadlines(
        connect_seconds=min(Deadlines().connect_seconds, stall_seconds),
        stall_seconds=stall_seconds,
        total_seconds=total_seconds,
        first_seconds=total_seconds if os.environ.get(STORE_SECONDS) else Deadlines().first_seconds,
    )


def _seconds_of(variable: str, default: float) -> float:
    said = os.environ.get(variable) or str(default)
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(refusal(variable, said, "it must be a number of seconds above 0"))
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Bytes of a file at a URL."""

    url: str
    """Address of the file."""
    begin: int = 0
    """First byte."""
    end: int | None = None
    """The byte after the last one; None for the whole file."""
    size_bytes: int | None = None
    """Size of the file when listed; None if it was not listed."""
    version: str | None = None
    """Its version when listed; None if its store has none."""


class Unranged(ConfigError):
    """A large file whose server sends all of it instead of a range."""


class Vanished(ConfigError):
    """A file that was listed no longer exists, or may not be read."""


# What went wrong in a try.


class _Problem(Exception):
    """A try failed permanently."""

    most_tries = 1
    """Failed tries on a listed file after which the problem counts as permanent."""


class _Passing(_Problem):
    """A try failed for a transient reason; the store may ask for a pause of some seconds."""

    most_tries = sys.maxsize

    def __init__(self, what: str, wait_seconds: float = 0.0) -> None:
        super().__init__(what)
        self.wait_seconds = wait_seconds


class _Gone(_Problem):
    """There is no such file, or it may not be read; stores behind caches may briefly disagree."""

    most_tries = 3


class _Unranged(_Problem):
    """All of a large file would be sent instead of a range; one of several proxies may do so."""

    most_tries = 3


class _Changed(_Problem):
    """The file is not the one that was listed."""


def _problem(error: Exception) -> _Problem:
    """The problem behind an exception of a store's package."""
    if isinstance(error, _Problem):
        return error
    cause: BaseException | None = error
    while cause is not None:  # packages wrap the answers of their store
        if (found := _answered(cause)) is not None:
            return _of_status(*found)
        cause = cause.__cause__
    said = shortened(" ".join(str(error).split()) or type(error).__name__)
    if isinstance(error, FileNotFoundError):
        return _Gone("there is no such file or folder")
    if isinstance(error, PermissionError) or "Forbidden" in said:  # gcsfs raises OSError
        return _Gone(f"it may not be read: {said}")
    if isinstance(error, TimeoutError):
        return _Passing("it does not answer in time")
    if isinstance(error, (OSError, EOFError)) or _is_of_network(error):
        return _Passing(said)
    return _Problem(said)


def _answered(error: BaseException) -> tuple[int, Mapping[str, str]] | None:
    """HTTP status and headers in an exception of aiohttp, botocore or gcsfs."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        about = response.get("ResponseMetadata", {})
        status, headers = about.get("HTTPStatusCode"), about.get("HTTPHeaders", {})
        if response.get("Error", {}).get("Code") == "RequestTimeout":
            status = 408  # which S3 reports as 400
    else:
        # Only for gcsfs: aiohttp also sets `code` if its parser cannot read an answer.
        is_of_gcs = type(error).__module__.startswith("gcsfs")
        status = getattr(error, "code" if is_of_gcs else "status", None)
        headers = getattr(error, "headers", None) or {}
    if not str(status).isdecimal() or not 100 <= int(str(status)) < 600:
        return None
    return int(str(status)), headers


def _is_of_network(error: Exception) -> bool:
    packages = ("aiohttp", "botocore", "aiobotocore", "requests", "urllib3", "google", "fsspec")
    return type(error).__module__.split(".")[0] in packages


def _of_status(status: int, headers: Mapping[str, str]) -> _Problem:
    """The problem of an HTTP status (RFC 9110, section 15)."""
    what = f"HTTP {status}"
    if status in (404, 410):
        return _Gone(f"there is no such file or folder: {what}")
    if status in (401, 403):
        return _Gone(f"it may not be read: {what}")
    if status in (412, 416):
        return _Changed(what)
    if status in (408, 425, 429) or (status >= 500 and status not in (501, 505)):
        return _Passing(what, _retry_after(headers))
    return _Problem(what)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds for which the store asks not to be called (RFC 9110, section 10.2.3)."""
    lower = {name.lower(): value for name, value in headers.items()}
    said = str(lower.get("retry-after", "")).strip()
    if said.isdecimal():
        return float(said)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(said).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


# Tries.

_sleep = asyncio.sleep


async def _tried(
    field: str,
    url: str,
    attempt: Callable[[], Awaitable[T]],
    limits: Deadlines,
    *,
    is_seen: bool,
    try_seconds: float = 0.0,
) -> T:
    """The result of `attempt`, retried until it succeeds or the deadline has passed, with at least
    `try_seconds` for each try.

    Raises:
        Unavailable: if the store does not answer correctly before the deadline.
        ConfigError: if the file does not exist, has changed, or cannot be read this way.
    """
    seconds = limits.total_seconds if is_seen else limits.first_seconds
    began, tries = time.monotonic(), 0
    failed: dict[type[_Problem], int] = {}
    last: tuple[_Problem, Exception] | None = None
    while True:
        tries += 1
        left = began + seconds - time.monotonic()
        try:
            return await asyncio.wait_for(attempt(), max(left, try_seconds, 0.001))
        except Exception as error:  # noqa: BLE001  each store's package has its own; named below
            # A last try that the deadline cut short says less than the one before.
            is_cut = isinstance(error, TimeoutError) and left < limits.first_wait_seconds
            if last is None or not is_cut:
                last = (_problem(error), error)
            problem, cause = last
        passed = time.monotonic() - began
        told = f"{problem}; {tries} {'try' if tries == 1 else 'tries'} in {passed:.1f} s"
        kind = type(problem)
        failed[kind] = failed.get(kind, 0) + 1
        # Full jitter: processes that failed together do not retry together.
        longest = min(limits.first_wait_seconds * 2 ** (tries - 1), limits.longest_wait_seconds)
        asked = problem.wait_seconds if isinstance(problem, _Passing) else 0.0
        wait = max(asked, 0.0, min(random.uniform(0, longest), (seconds - passed) / 2))
        is_late = passed + wait >= seconds or seconds - passed < limits.first_wait_seconds / 10
        is_lasting = failed[kind] >= (kind.most_tries if is_seen else 1)
        if kind is _Gone and is_seen and passed < limits.gone_seconds:
            is_lasting = False
        if kind is not _Passing and (is_late or is_lasting):
            _refuse(field, url, problem, told, cause, is_seen=is_seen)
        if is_late:
            again = "resume the run" if is_seen else "try again"
            raise Unavailable(
                f"{field}: {url} is not available ({told}); {again} when its store answers, "
                f"or raise {STORE_SECONDS}={limits.total_seconds:g}."
            ) from cause
        await _sleep(wait)


def _refuse(
    field: str, url: str, problem: _Problem, told: str, cause: Exception, *, is_seen: bool
) -> NoReturn:
    if isinstance(problem, _Changed):
        raise ConfigError(
            f"{field}: {url} was rewritten while it was read ({told}); bring it back as it "
            "was, or begin a new run."
        ) from cause
    if isinstance(problem, _Gone) and is_seen:
        raise Vanished(
            f"{field}: {url} was there when it was listed, and cannot be read any more ({told}); "
            "bring it back as it was."
        ) from cause
    if isinstance(problem, _Gone):
        raise ConfigError(refusal(field, url, str(problem))) from cause
    if isinstance(problem, _Unranged):
        raise Unranged(refusal(field, url, f"it cannot be read ({told})")) from cause
    raise ConfigError(refusal(field, url, f"it cannot be read ({told})")) from cause


# File systems of fsspec.


def filesystem_of(field: str, location: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    Raises:
        ConfigError: if fsspec, or its package for the protocol, is not installed.
    """
    try:
        from fsspec.config import conf
        from fsspec.core import url_to_fs
    except ImportError as error:
        accepted = 'a URL needs fsspec: "pip install fsspec" and the package of its protocol'
        raise ConfigError(refusal(field, location, accepted)) from error
    protocol, options = location.partition("://")[0], {}
    if protocol in ("s3", "s3a"):
        # One try for each of ours: botocore's own retries would add to them, beyond our deadlines.
        limits, said = deadlines(), conf.get(protocol, {}).get("config_kwargs", {})
        own = {
            "connect_timeout": limits.connect_seconds,
            "read_timeout": limits.stall_seconds,
            "retries": {"total_max_attempts": 1},
        }
        options["config_kwargs"] = own | said
    try:
        filesystem, path = url_to_fs(location, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(refusal(field, location, f"it cannot be read ({error})")) from error
    if protocol in ("s3", "s3a"):
        filesystem.retries = 1
    return filesystem, path


def _is_http(filesystem: Any) -> bool:
    return "http" in _protocols(filesystem)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    said = filesystem.protocol
    return (said,) if isinstance(said, str) else tuple(said)


async def _called(filesystem: Any, method: str, *arguments: Any, **keywords: Any) -> Any:
    """The result of a method of a file system, whether that is asynchronous or not."""
    if filesystem.async_impl:
        return await getattr(filesystem, f"_{method}")(*arguments, **keywords)
    return await asyncio.to_thread(getattr(filesystem, method), *arguments, **keywords)


def _run(work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, run in fsspec's thread."""
    from fsspec.asyn import get_loop, sync

    return cast(T, sync(get_loop(), work))


# Listings.


def store_version(about: Mapping[str, Any]) -> str | None:
    """The version of a file in the metadata of Google Cloud Storage, S3, HTTP, Hugging Face or
    another store: preferably one that changes with the content, else a time, which may not."""
    names = (
        *("generation", "ETag", "etag", "blob_id"),
        *("mtime", "LastModified", "last_modified", "Last-Modified", "updated"),
    )
    return next((str(about[name]) for name in names if about.get(name) is not None), None)


def listing(
    field: str, location: str, *, is_whole: bool = False
) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """The path of a URL in its store, and what is there, by path, with "size" and other metadata
    from the store: the file itself, the files below a folder, or those that match a glob. If the
    listing is to be whole, the store is asked about each file whose size or version it left out.

    Raises:
        Unavailable: if the store does not answer.
        ConfigError: if nothing is there, or it cannot be read.
    """
    filesystem, root = filesystem_of(field, location)
    limits = deadlines()

    async def found() -> dict[str, Mapping[str, Any]]:
        filesystem.invalidate_cache()
        if frozenset("*?[") & set(root):
            within = await _called(filesystem, "glob", root, detail=True)
        elif _is_http(filesystem) and not root.endswith("/"):
            return {root: await _http_about(filesystem, root, limits)}
        elif _is_http(filesystem):
            within = await _called(filesystem, "find", root, detail=True)
        else:
            about = await _called(filesystem, "info", root)
            if about["type"] != "directory":
                return {root: about}
            within = await _called(filesystem, "find", root, detail=True)
        return {path: each for path, each in within.items() if each.get("type") == "file"}

    async def all_known() -> dict[str, Mapping[str, Any]]:
        files = await _tried(
            *(field, location, found, limits), is_seen=False, try_seconds=limits.total_seconds
        )
        if not is_whole:
            return files
        unknown = [
            path
            for path, about in files.items()
            if about.get("size") is None or store_version(about) is None
        ]

        async def known(path: str) -> Mapping[str, Any]:
            async def about() -> Mapping[str, Any]:
                if _is_http(filesystem):
                    return await _http_about(filesystem, path, limits)
                return await _called(filesystem, "info", path)

            return await _tried(field, path, about, limits, is_seen=False)

        return files | dict(zip(unknown, await _gathered(known, unknown), strict=True))

    return root, _run(all_known)


async def _gathered(work: Callable[[Any], Awaitable[T]], items: Sequence[Any]) -> list[T]:
    """The results of `work` for `items`, some concurrently; the first error ends the others."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def one(item: Any) -> T:
        async with free:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _http_about(filesystem: Any, url: str, limits: Deadlines) -> Mapping[str, Any]:
    """Size and version of a file over HTTP; from servers without HEAD, by requesting one byte."""
    session = await filesystem.set_session()
    options = dict(filesystem.kwargs)
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity"}
    options |= {"timeout": _timeout(limits), "allow_redirects": True}
    url = filesystem.encode_url(url)
    async with session.head(url, headers=headers, **options) as answer:
        status, said = answer.status, answer.headers
    if status in (401, 403, 405, 501):  # such as for addresses that are signed for GET
        headers["Range"] = "bytes=0-0"
        async with session.get(url, headers=headers, **options) as answer:
            status, said = answer.status, answer.headers
    if status not in (200, 206):
        raise _of_status(status, said)
    size = said.get("Content-Range", "").rpartition("/")[2] or said.get("Content-Length", "")
    if not size.isdecimal():
        raise _Problem("its server does not say how large it is")
    about = {name: said.get(name) for name in ("ETag", "Last-Modified")}
    return about | {"size": int(size), "type": "file"}


def _timeout(limits: Deadlines) -> Any:
    import aiohttp

    return aiohttp.ClientTimeout(
        total=None, sock_connect=limits.connect_seconds, sock_read=limits.stall_seconds
    )


# Reads.


def read_ranges(field: str, ranges: Sequence[Wanted]) -> list[bytes]:
    """The bytes of `ranges`, all in one store, some requested concurrently.

    Raises:
        Unavailable: if the store does not answer correctly before the deadline.
        Vanished: if a file is gone.
        Unranged: if a file is large and its server ignores ranges.
        ConfigError: if a file has changed since it was listed, or cannot be read this way.
    """
    if not ranges:
        return []
    filesystem, _ = filesystem_of(field, ranges[0].url)
    limits = deadlines()

    async def one(wanted: Wanted) -> bytes:
        return await _tried(
            field, wanted.url, lambda: _read(filesystem, wanted, limits), limits, is_seen=True
        )

    async def check(wanted: Wanted) -> None:
        await _tried(
            field, wanted.url, lambda: _require_same(filesystem, wanted), limits, is_seen=True
        )

    async def work() -> list[bytes]:
        if not (_is_http(filesystem) or _is_s3(filesystem) or _is_gcs(filesystem)):
            seen = {each.url: each for each in ranges if each.size_bytes is not None}
            await _gathered(check, list(seen.values()))
        return await _gathered(one, ranges)

    return _run(work)


def copy_whole(field: str, wanted: Wanted, copy: BinaryIO) -> None:
    """Write a whole file to `copy` in one HTTP request, for servers that ignore ranges.

    Raises:
        Unavailable: if the store does not answer correctly before the deadline.
        Vanished: if it is gone.
        ConfigError: if it has changed since it was listed, or cannot be read.
    """
    filesystem, _ = filesystem_of(field, wanted.url)
    limits = deadlines()

    async def attempt() -> None:
        copy.seek(0)
        copy.truncate()
        await _read_http(filesystem, wanted, limits, copy)
        if wanted.size_bytes is not None and copy.tell() != wanted.size_bytes:
            raise _Passing(f"{copy.tell()} bytes came in place of {wanted.size_bytes}")

    seconds = (wanted.size_bytes or 0) / _SLOWEST_BYTES_PER_SECOND
    _run(
        lambda: _tried(field, wanted.url, attempt, limits, is_seen=True, try_seconds=seconds),
    )


def read_whole(field: str, urls: Sequence[str]) -> list[bytes | None]:
    """The contents of files in one store that were listed without their versions; None for one that
    is gone.

    Raises:
        Unavailable: if the store does not answer correctly before the deadline.
        ConfigError: if one cannot be read.
    """
    if not urls:
        return []
    filesystem, _ = filesystem_of(field, urls[0])
    limits = deadlines()

    async def one(url: str) -> bytes | None:
        wanted = Wanted(url=url)
        try:
            return await _tried(
                field, url, lambda: _read(filesystem, wanted, limits), limits, is_seen=True
            )
        except Vanished:
            return None

    return _run(lambda: _gathered(one, urls))


def _is_s3(filesystem: Any) -> bool:
    return "s3" in _protocols(filesystem) and hasattr(filesystem, "_call_s3")


def _is_gcs(filesystem: Any) -> bool:
    return "gs" in _protocols(filesystem) and hasattr(filesystem, "_get_headers")


async def _read(filesystem: Any, wanted: Wanted, limits: Deadlines) -> bytes:
    if wanted.begin == wanted.end:
        return b""
    if _is_http(filesystem):
        content = await _read_http(filesystem, wanted, limits)
    elif _is_gcs(filesystem):
        content = await _read_gcs(filesystem, wanted, limits)
    else:
        size = (wanted.end or wanted.size_bytes or 2**26) - wanted.begin
        seconds = limits.connect_seconds + limits.stall_seconds + size / _SLOWEST_BYTES_PER_SECOND
        read = _read_s3 if _is_s3(filesystem) else _read_other
        content = await asyncio.wait_for(read(filesystem, wanted), seconds)
    end = wanted.size_bytes if wanted.end is None else wanted.end
    if end is not None and len(content) != end - wanted.begin:
        raise _Passing(f"{len(content)} bytes came in place of {end - wanted.begin}")
    return content


async def _read_http(
    filesystem: Any, wanted: Wanted, limits: Deadlines, copy: BinaryIO | None = None
) -> bytes:
    session = await filesystem.set_session()
    options = dict(filesystem.kwargs)
    headers = {**options.pop("headers", {}), **_range_header(wanted)}
    if wanted.version is not None and wanted.version.startswith('"'):  # a strong ETag
        headers["If-Match"] = wanted.version
    request = session.get(
        filesystem.encode_url(wanted.url), headers=headers, timeout=_timeout(limits), **options
    )
    async with request as answer:
        version = answer.headers.get("Last-Modified" if _is_date(wanted.version) else "ETag")
        content = await _content(answer, wanted, version, copy)
    if version is None and wanted.version is not None:  # some state it only for HEAD
        _require_version(await _http_about(filesystem, wanted.url, limits), wanted)
    return content


def _is_date(version: str | None) -> bool:
    """Whether a version is the time of a file on an HTTP server without ETags."""
    return version is not None and email.utils.parsedate(version) is not None


def _range_header(wanted: Wanted) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity"}  # else the range may be of compressed bytes
    if wanted.end is not None:
        headers["Range"] = f"bytes={wanted.begin}-{wanted.end - 1}"
    return headers


async def _read_gcs(filesystem: Any, wanted: Wanted, limits: Deadlines) -> bytes:
    await filesystem._set_session()
    path = filesystem._strip_protocol(wanted.url)
    options = {} if wanted.version is None else {"params": {"ifGenerationMatch": wanted.version}}
    request = filesystem.session.get(
        filesystem.url(path),
        headers=filesystem._get_headers(_range_header(wanted)),
        timeout=_timeout(limits),
        **options,
    )
    async with request as answer:
        version = answer.headers.get("x-goog-generation")
        content = await _content(answer, wanted, version)
    if version is None and wanted.version is not None:  # it may not know conditions either
        await _require_same(filesystem, wanted)
    return content


async def _content(
    answer: Any, wanted: Wanted, version: str | None, copy: BinaryIO | None = None
) -> bytes:
    """The bytes of an HTTP answer, if they are those wanted; empty if they go to `copy`.

    Raises:
        _Problem: if they are not.
    """
    if answer.status not in (200, 206):
        raise _of_status(answer.status, answer.headers)
    if wanted.version is not None and version is not None and version != wanted.version:
        raise _Changed(f"its version is {version} in place of {wanted.version}")
    if answer.status == 206:
        _require_range(answer.headers.get("Content-Range", ""), wanted)
    elif wanted.size_bytes is not None:
        length = answer.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) != wanted.size_bytes:
            # most likely a page of a proxy instead of the file
            raise _Passing(f"{length} bytes came in place of {wanted.size_bytes}")
        if wanted.end is not None and wanted.size_bytes > MOST_IGNORED_BYTES:
            raise _Unranged(
                f"its server ignores ranges, and would send {wanted.size_bytes} bytes for each"
            )
    if copy is not None:
        async for piece in answer.content.iter_chunked(2**20):
            copy.write(piece)
        return b""
    content = await answer.read()
    if answer.status == 200 and wanted.end is not None:
        content = content[wanted.begin : wanted.end]
    return content


def _require_range(said: str, wanted: Wanted) -> None:
    """Refuse a part other than the wanted one, or of a file of another size."""
    where, _, size = said.removeprefix("bytes ").partition("/")
    if wanted.size_bytes is not None and size.isdecimal() and int(size) != wanted.size_bytes:
        raise _Changed(f"it has {size} bytes in place of {wanted.size_bytes}")
    first = where.partition("-")[0]
    if first.isdecimal() and int(first) != wanted.begin:
        raise _Passing(f"bytes from {first} on came in place of those from {wanted.begin} on")


async def _read_s3(filesystem: Any, wanted: Wanted) -> bytes:
    bucket, key, version_id = filesystem.split_path(wanted.url)
    asked = {"Bucket": bucket, "Key": key}
    if wanted.end is not None:
        asked["Range"] = f"bytes={wanted.begin}-{wanted.end - 1}"
    if version_id is not None:
        asked["VersionId"] = version_id
    if wanted.version is not None:
        asked["IfMatch"] = wanted.version
    answer = await filesystem._call_s3("get_object", **asked)
    async with answer["Body"] as body:
        found = answer.get("ETag")
        if wanted.version is not None and found is not None and found != wanted.version:
            raise _Changed(f"its version is {found} in place of {wanted.version}")
        _require_range(answer.get("ContentRange") or "", wanted)
        return await body.read()


async def _read_other(filesystem: Any, wanted: Wanted) -> bytes:
    path = filesystem._strip_protocol(wanted.url)
    content = await _called(filesystem, "cat_file", path, wanted.begin or None, wanted.end)
    return content[: wanted.end - wanted.begin] if wanted.end is not None else content


async def _require_same(filesystem: Any, wanted: Wanted) -> None:
    """Refuse a file that is not the listed one, in a store that does not support conditions."""
    path = filesystem._strip_protocol(wanted.url)
    filesystem.invalidate_cache()
    _require_version(await _called(filesystem, "info", path), wanted)


def _require_version(about: Mapping[str, Any], wanted: Wanted) -> None:
    if wanted.size_bytes is not None and about.get("size") != wanted.size_bytes:
        raise _Changed(f"it has {about.get('size')} bytes in place of {wanted.size_bytes}")
    if wanted.version is not None and (found := store_version(about)) != wanted.version:
        raise _Changed(f"its version is {found} in place of {wanted.version}")
