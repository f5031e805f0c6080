"""ArrayRecord files, as TFDS and MaxText write them: their files, counts and records."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from scalejax.config.data import ArrayRecordConfig, Split
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.core.errors import ConfigError, Damaged, refusal, unknown_name

if TYPE_CHECKING:  # other data sets need no Arrow, and commands start sooner without it
    from scalejax.core.filesystem import DataFile

_FILE_NAME = re.compile(r".*\.array_?record(-\d+-of-\d+)?")
"""name.array_record, or name-train.array_record-00000-of-00010 as TFDS names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """A file of records."""

    file: "DataFile"
    """The file, local or at a URL."""
    path: str
    """Path of the file, or of its copy, on this machine."""
    count: int
    """Records in it."""


class NoExample(Exception):
    """Bytes that are not a `tf.train.Example`, or one without the required features."""


def array_record_facts(config: ArrayRecordConfig) -> DatasetFacts:
    """Counts of records.

    Raises:
        ConfigError: as for `record_files`; if the first record of a part has other features.
        Damaged: if that record cannot be read.
    """
    counts = {}
    for part in config.parts:
        files = record_files(config, part)
        counts[part] = sum(file.count for file in files)
        first = next(file for file in files if file.count)
        try:
            (record,) = read_records(first, [0])
            image_and_class(record, config.image_column, config.label_column)
        except NoExample as error:
            raise ConfigError(f"data.{part}: {first.file.path}, record 0: {error}.") from error
        except RuntimeError as error:
            raise Damaged(
                f"data.{part}: {first.file.path} is damaged (record 0: {error}); "
                "write or copy it again, or leave it out."
            ) from error
    return DatasetFacts(
        train_examples=counts["train"],
        test_examples=counts["test"],
        validation_examples=counts.get("validation", 0),
        input_shape=(config.image_size, config.image_size, config.channels),
        target_shape=(),
        classes=config.classes,
    )


def record_files(config: ArrayRecordConfig, part: Split) -> tuple[RecordFile, ...]:
    """The files of one part, in order.

    Raises:
        ConfigError: if there are no files, one is incomplete or not an ArrayRecord, or they hold
            no records; if they are at a URL and there is no folder for copies, or their store does
            not say when they are rewritten.
    """
    from scalejax.core.filesystem import is_url, listed, local_copy

    field, location = f"data.{part}", getattr(config, part)
    if is_url(location) and config.cache_folder is None:
        accepted = f"{field} is a URL, and ArrayRecord is read from local disks; name a folder"
        raise ConfigError(refusal("data.cache_folder", None, accepted))
    found = listed(
        field, location, lambda name: bool(_FILE_NAME.fullmatch(name)), "file *.array_record"
    )
    files = []
    for file in found:
        path = file.path
        if is_url(path):
            _require_version(config, file)
            path = local_copy(field, file, config.cache_folder or "")
        files.append(RecordFile(file=file, path=path, count=_count(field, file, path)))
    if not any(file.count for file in files):
        raise ConfigError(refusal(field, location, "its files hold no records"))
    return tuple(files)


def _require_version(config: ArrayRecordConfig, file: "DataFile") -> None:
    """Refuse to copy a file without a version, whose changes in storage would go unnoticed."""
    if file.version is None:
        accepted = (
            f"the store of {file.path} says neither when it was written nor what its content is; "
            "copy the files to this machine, and name them there"
        )
        raise ConfigError(refusal("data.cache_folder", config.cache_folder, accepted))


def read_records(file: RecordFile, positions: Sequence[int]) -> list[bytes]:
    """The records at `positions` of a file.

    Raises:
        RuntimeError: if one is damaged, saying where.
    """
    return _reader(file.path, file.file).read(positions)


@lru_cache(maxsize=65536)
def _count(field: str, file: "DataFile", path: str) -> int:
    reader = _reader(path, file)
    if not reader.ok():
        raise ConfigError(
            f"{field}: {file.path} cannot be read as ArrayRecord (its end, where records are "
            "listed, is damaged or missing); write or copy it again, or leave it out."
        )
    return reader.num_records()


@lru_cache(maxsize=256)  # each holds a file descriptor
def _reader(path: str, file: "DataFile") -> Any:
    """The file, open; a new reader once it is rewritten."""
    from array_record.python.array_record_module import ArrayRecordReader

    # the next record may be anywhere, so data next to this one is of no use
    return ArrayRecordReader(path, options="readahead_buffer_size:0", file_reader_buffer_size=32768)


def image_and_class(record: bytes, image_column: str, label_column: str) -> tuple[bytes, int]:
    """The encoded image and the class of a record.

    Raises:
        NoExample: if it is not a `tf.train.Example`, or has no such features.
    """
    from google.protobuf.message import DecodeError

    try:
        features: Mapping[str, Any] = _example_type().FromString(record).features.feature
    except DecodeError as error:
        raise NoExample(f"it is not a tf.train.Example ({error})") from error
    values = []
    for field, name, kind in (
        ("image_column", image_column, "bytes_list"),
        ("label_column", label_column, "int64_list"),
    ):
        if name not in features:
            unknown = unknown_name(f"data.{field}", name, features).removesuffix(".")
            raise NoExample(f"it has no such feature: {unknown}")
        value = getattr(features[name], kind).value
        if len(value) != 1:
            raise NoExample(f"feature {name!r} has {len(value)} values in its {kind}, and not one")
        values.append(value[0])
    return values[0], values[1]


@cache
def _example_type() -> Any:
    """The message `tf.train.Example`.

    It has its own descriptor pool, so that TensorFlow may define it too; field numbers are those
    of tensorflow/core/example/{example,feature}.proto.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="e", syntax="proto3")

    def add(message: Any, name: str, number: int, kind: int, *, of: str = "", many: bool = False):
        label = types.LABEL_REPEATED if many else types.LABEL_OPTIONAL
        message.field.add(name=name, number=number, type=kind, label=label, type_name=of or None)

    lists = {"BytesList": types.TYPE_BYTES, "FloatList": types.TYPE_FLOAT}
    for name, kind in (lists | {"Int64List": types.TYPE_INT64}).items():
        add(file.message_type.add(name=name), "value", 1, kind, many=True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), 1):
        snake = name.replace("List", "_list").lower()
        add(feature, snake, number, types.TYPE_MESSAGE, of=f".e.{name}")
        feature.field[-1].oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, types.TYPE_STRING)
    add(entry, "value", 2, types.TYPE_MESSAGE, of=".e.Feature")
    add(features, "feature", 1, types.TYPE_MESSAGE, of=".e.Features.FeatureEntry", many=True)
    example = file.message_type.add(name="Example")
    add(example, "features", 1, types.TYPE_MESSAGE, of=".e.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("e.Example"))
