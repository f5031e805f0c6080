"""Cases of configs: run.toml files, and flags, of which something is wrong.

What is right are the examples of scalejax and a file for each other kind of table; what may be
wrong besides are all fields that `scalejax config fields` lists.
"""

import copy
import random
import textwrap
import tomllib
from functools import cache
from pathlib import Path

import mutations
from campaign import Case
from sense import TOLD

import scalejax
from scalejax.config.presets import PRESETS
from scalejax.config.reference import run_reference

EXAMPLES = Path(scalejax.__file__).parent / "config" / "examples"

_OTHERS = (
    """
    model.name = "gpt"
    data = { name = "synthetic_tokens", tokens = 64, vocabulary = 512 }
    batch.global_batch = 64
    optimizer.name = "adamw"
    schedule.base_learning_rate = 0.001
    """,
    """
    model = { name = "llama", remat = "full" }
    data = { name = "synthetic_tokens", tokens = 64, vocabulary = 512 }
    batch = { global_batch = 64, microbatches = 2 }
    optimizer.name = "lamb"
    layout = { fsdp = 2, tensor = 2, sequence_parallel = true }
    [schedule]
    base_learning_rate = 0.001
    warmup = "gradual"
    warmup_epochs = 1
    warmup_from = "zero"
    decay = "cosine"
    """,
    """
    model = { name = "gpt", layers = 8 }
    data = { name = "synthetic_tokens", tokens = 64, vocabulary = 512 }
    batch = { global_batch = 64, microbatches = 8 }
    optimizer.name = "adamw"
    schedule.base_learning_rate = 0.001
    layout = { pipeline = 4, zero_stage = 1 }
    """,
    """
    model = { name = "bert_base", layers = 2 }
    data.name = "masked_tokens"
    batch.per_device_batch = 4
    optimizer.name = "lars"
    schedule.base_learning_rate = 0.001
    """,
    """
    model = { name = "vit", patch = 4, layers = 2, hidden = 64, heads = 4 }
    data = { name = "synthetic_images", image_size = 32, classes = 10, validation_fraction = 0.2 }
    batch = { global_batch = 64, ramp_epochs = [2, 4] }
    optimizer.name = "adamw"
    schedule = { base_learning_rate = 0.001, decay = "polynomial", decay_share = 0.5 }
    averaging.name = "ema"
    loss.label_smoothing = 0.1
    train = { epochs = 6, early_stopping = {}, divergence.max_gradient_growth = 50 }
    input.augmentation = { flip = true, mixup_alpha = 0.2 }
    """,
    """
    model = { name = "mlp", hidden = [16] }
    data = { name = "synthetic_images", image_size = 32, classes = 10 }
    batch.global_batch = 64
    optimizer.name = "sgd"
    schedule = { name = "horovod", initial_learning_rate = 0.1, workers = 8 }
    train = { epochs = 2, noise_scale = {}, sharpness = { samples = 64 } }
    """,
)
_COMMANDS = ("config show",) * 12 + ("sweep",) * 3 + ("schedule plot",) + ("predict",) * 4 + (
    "search", "search", "plan", "launch", "train", "explain",
)  # fmt: skip
_DEVICES = (
    "8", "1", "0", "-1", "", "x", "1e3", "8,", "8,,8", "7", "2**3", "99999999999999999999", "8..4",
    "1..4096", "8.0", "nan", "٣", " 8", "1_000", str(2**63), "8,8", "0..8", "1" * 5000,
)  # fmt: skip


@cache
def bases() -> tuple[mutations.Tree, ...]:
    """Configs that are right."""
    found = [tomllib.loads(path.read_text()) for path in sorted(EXAMPLES.glob("*.toml"))]
    found += [tomllib.loads(textwrap.dedent(text)) for text in _OTHERS]
    return tuple(found)


@cache
def fields() -> tuple[tuple[str, ...], ...]:
    """Paths of all fields that there are, and of tables, some of them absent by default."""
    found = {tuple(each.name.split(".")) for table in run_reference() for each in table.fields}
    return tuple(sorted(found | {path[:-1] for path in found if len(path) > 1}))


@cache
def _choices() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Words that a field may be, by its path: of all kinds of its table together."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for table in run_reference():
        for each in table.fields:
            words = tuple(each.accepted.split(" | ")) if " | " in each.accepted else ()
            path = tuple(each.name.split("."))
            found[path] = found.get(path, ()) + words
    found["model", "name"] = found.get(("model", "name"), ()) + tuple(PRESETS)
    return found


def config_case(number: int, folder: Path, seed: int) -> Case:
    """A config, written into `folder`, and the command that reads it."""
    draw = random.Random(f"{seed} config {number}")
    base = draw.choice(bases())
    right = mutations.toml(base).encode()
    flags: list[str] = []
    exact: set[str] = set()
    kind = draw.randrange(20)
    text = right
    if kind <= 9:
        text = mutations.toml(mutations.changed(draw, base, fields())).encode("utf-8", "replace")
    elif kind <= 12:
        text = mutations.toml(_contradicting(draw, base)).encode()
    elif kind <= 15:
        text = mutations.damaged_text(draw, right)
    else:
        flags = _dotted(draw)
        exact |= {flag.partition("=")[0].lstrip("-") for flag in flags}
    command = draw.choice(_COMMANDS)
    if command == "search" and base["model"]["name"] not in ("gpt", "llama"):
        command = "config show"  # the others it refuses as they are
    if command in ("explain", "plan") and base["batch"].get("ramp_epochs"):
        command = "predict"  # the others know one batch
    rest = _flags_of(command, draw)
    if command in ("predict", "plan", "search", "explain"):
        rest += ["--json", TOLD]
    if command in ("launch", "train"):  # what makes processes: refused before it does
        exact |= {rest[0], rest[0].strip("-").replace("-", "_")}
    if draw.random() < 0.05 and kind > 15:
        odd = draw.choice(["--devices", "--top", "--np", "--deadline", "--price", "--clusters"])
        flags += [odd, draw.choice([*_DEVICES, *mutations.TEXTS])]
        exact |= {odd.strip("-"), odd.strip("-").removesuffix("s"), odd}
    (folder / "run.toml").write_bytes(text)
    exact_changed, loose = _names(base, text)
    loose |= {part for name in exact for part in name.split(".")}
    if "layout" in loose:  # whose axes are named as factors of what a batch must divide into
        loose |= {"data*fsdp"}
    if command == "search":
        loose |= {"no strategy fits"}  # an answer, with the size that comes nearest
    words = [*command.split(), "run.toml", *rest, *flags]
    return Case(words, tuple(sorted(exact | exact_changed)), tuple(sorted(loose)))


def _names(base: mutations.Tree, text: bytes) -> tuple[set[str], set[str]]:
    """What a refusal may name: the fields that differ; and their tables, the file."""
    after = mutations.parsed(text)
    if after is None:
        return {"run.toml"}, set()
    paths = [
        tuple(part or '""' for part in path)  # as a refusal names an empty key
        for path in mutations.differing(base, after)
    ]
    exact = {".".join(path) for path in paths} | {path[-1] for path in paths if path}
    exact |= {path[-2] for path in paths if len(path) > 1 and path[-1].isdigit()}
    loose = {part for path in paths for part in path} | {"run.toml"}
    return exact, loose


def _contradicting(draw: random.Random, base: mutations.Tree) -> mutations.Tree:
    """Fields that each can be what they are, but hardly together."""
    tree = copy.deepcopy(base)
    for _ in range(draw.choice([1, 2, 3, 5])):
        path = draw.choice(fields())
        words = _choices().get(path, ())
        numbers = [1, 2, 3, 4, 5, 7, 8, 64, 100, 0.5, 1.0, 2.0, True, False, [1], [1, 2], [3.0], {}]
        value = draw.choice(words) if words and draw.random() < 0.8 else draw.choice(numbers)
        mutations.place(tree, path, {"true": True, "false": False}.get(str(value), value))
    return tree


def _dotted(draw: random.Random) -> list[str]:
    """Flags with dots, of all kinds."""
    found: list[str] = []
    for _ in range(draw.choice([1, 1, 2])):
        name = ".".join(draw.choice(fields()))
        value = str(mutations.hostile(draw)) if draw.random() < 0.5 else "3"
        value = value.replace("\x00", "")
        if draw.random() < 0.2:
            value = mutations._value(mutations.hostile(draw)).replace("\x00", "")
        odd = [
            f"--{mutations.misspelt(draw, name)}.x={value}", f"--{name}.={value}", f"--.{name}=3",
            f"--{name}..x=1", "--.=1", "--..=1", f"--{'a.' * 3000}b=1", f"--{name}",
            f"--{name}.a.b.c={value}", f"--{name.replace('.', '..')}={value}", "--a.b", "--é.ü=1",
            f"--{name}=" + "[" * 3000, f"--{name}=" + "[" * 300 + "]" * 300,
            f"--{name.split('.')[0]}={{name = \"x\"}}", f"--{name.upper()}={value}",
            f"--{name.replace('_', '-')}={value}", f"-{name}={value}", "--seed=x", "--model=3",
            f"--{name}=" + "{a=" * 2000 + "1" + "}" * 2000, "--batch=", f"--{name}=9" + "9" * 5000,
            f"--conditions.{name.split('.')[-1]}={value}", f"--conditions.step_cv={value}",
        ]  # fmt: skip
        found.append(draw.choice(odd) if draw.random() < 0.5 else f"--{name}={value}")
    return found


def _flags_of(command: str, draw: random.Random) -> list[str]:
    devices = str(draw.choice([8, 8, 16]))
    cluster = ["--cluster", draw.choice(["dgx-h100", "dgx-a100", "big-basin-goyal2017"])]
    return {
        "config show": ["--devices", devices],
        "schedule plot": ["--devices", devices],
        "sweep": ["--plan", "--cpu-devices", devices],
        "predict": [*cluster, "--devices", devices],
        "explain": [*cluster, "--devices", devices],
        "search": [*cluster, "--devices", devices, "--confirm", "0"],
        # 30 billion parameters do not fit on fewer or smaller ones, whatever else is wrong
        "plan": ["--clusters", draw.choice(["dgx-h100", "dgx-a100"]), "--devices", "16"],
        "launch": [
            "--np",
            draw.choice(["0", "1", "x", "-x", "", "1.5", "nan", "99999999999999999"]),
        ],
        "train": ["--cpu-devices", draw.choice(["0", "-1", "513", "x", "", "1e9", str(2**70)])],
    }[command]
