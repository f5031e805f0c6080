"""A run begins with the weights that it is told to, under any layout, and says which they were."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.tree_util import tree_flatten_with_path

from scalejax.config.run import RunConfig, resolve, with_fields
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build, load
from scalejax.models import parameter_path
from scalejax.models.hub import read_safetensors
from scalejax.sweep.vmapped import train_together
from scalejax.training import loop
from scalejax.training.evaluation import build_evaluation, trained_weights
from scalejax.training.mesh import build_mesh
from scalejax.training.record import RunFolder, RunRecord, StatusChange
from scalejax.training.reporter import Silent
from scalejax.training.start import StartRecord, start_of
from scalejax.training.step import init_state
from scalejax.training.train import train

GPT = {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2}
LLAMA = {
    "name": "llama",
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 24,
    "rope_theta": 10_000.0,
}
TOKENS, VOCABULARY = 6, 32


def text_config(model: dict[str, Any], **tables: Any) -> RunConfig:
    """A run of a decoder."""
    return build(
        RunConfig,
        {
            "model": model,
            "data": {
                "name": "synthetic_tokens",
                "tokens": TOKENS,
                "vocabulary": VOCABULARY,
                "train_examples": 16,
                "test_examples": 8,
            },
            "batch": {"global_batch": 8},
            "optimizer": {"name": "sgd"},
            "schedule": {"base_learning_rate": 0.01},
            **tables,
        },
    )


def image_config(classes: int = 4, **tables: Any) -> RunConfig:
    """A run of a network with BatchNorm."""
    return build(
        RunConfig,
        {
            "model": {"name": "cnn", "channels": [4, 4]},
            "data": {
                "name": "synthetic_images",
                "image_size": 8,
                "channels": 1,
                "classes": classes,
                "train_examples": 32,
                "test_examples": 8,
            },
            "batch": {"global_batch": 8},
            "optimizer": {"name": "sgd", "momentum": 0.9},
            "schedule": {"base_learning_rate": 0.1},
            "train": {"epochs": 2, "keep_checkpoints": 2},
            **tables,
        },
    )


def named(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree by their paths."""
    return {
        parameter_path(path): np.asarray(leaf) for path, leaf in tree_flatten_with_path(tree)[0]
    }


def begun(config: RunConfig, devices: int = 1) -> dict[str, np.ndarray]:
    """Parameters and statistics before the first update."""
    run = resolve(config, devices)
    state = init_state(run, build_mesh(run.layout))
    return named(state.params) | named(state.model_state)


def write_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A file by the format's own description: size of the header, header, bytes."""
    header, at = {}, 0
    for name, array in arrays.items():
        kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[str(array.dtype)]
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """The folder of a run of two epochs with BatchNorm, two checkpoints kept."""
    folder = tmp_path_factory.mktemp("earlier") / "run"
    train(image_config(), folder, device_count=1, reporter=Silent())
    return folder


def test_a_run_begins_with_the_weights_of_an_earlier_one(earlier, tmp_path):
    """Bit for bit, running statistics among them; the record says which, and a resume needs them no
    more."""
    config = image_config(start={"weights": str(earlier)}, train={"epochs": 1})
    ended = trained_weights(resolve(image_config(), 1), earlier)
    expected = named(ended["params"]) | named(ended["model_state"])

    found = begun(config)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)

    moved = shutil.copytree(earlier, tmp_path / "moved")
    config = image_config(start={"weights": str(moved)}, train={"epochs": 1})
    record = train(config, tmp_path / "run", device_count=1, reporter=Silent())
    start = load(StartRecord, RunFolder(path=tmp_path / "run").start)
    first = record.measurements[0]
    assert isinstance(first, StatusChange)
    assert (start.weights, start.source, start.step) == (str(moved), "the weights", None)
    assert start.sha256[:12] in first.message
    shutil.rmtree(moved)
    longer = with_fields(config, {"train.epochs": 2})
    record = train(longer, tmp_path / "run", device_count=1, reporter=Silent(), resume=True)
    assert record.status == "completed"


def test_runs_of_a_sweep_go_on_without_the_weights_they_began_with(earlier, tmp_path, monkeypatch):
    """They are read once; what the record says of them stays as it was."""
    moved = shutil.copytree(earlier, tmp_path / "moved")
    config = image_config(start={"weights": str(moved)}, train={"epochs": 1})
    runs = [resolve(with_fields(config, {"seed": seed}), 1) for seed in (0, 1)]
    folders = [RunFolder(path=tmp_path / f"{seed}") for seed in (0, 1)]
    save, saved = loop.save_weights, []

    def killed_at_the_second(path, weights):
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(path, weights)

    monkeypatch.setattr(loop, "save_weights", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        train_together(runs, folders, tmp_path / "states", Silent())
    first = RunRecord.load(folders[1].path).measurements[0]
    assert isinstance(first, StatusChange)
    assert "from the weights in" in first.message
    before = folders[1].start.read_bytes()
    shutil.rmtree(moved)

    train_together(runs, folders, tmp_path / "states", Silent())

    assert [RunRecord.load(each.path).status for each in folders] == ["completed", "completed"]
    assert folders[1].start.read_bytes() == before


@pytest.mark.parametrize(
    "layout", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "pipeline": 2, "fsdp": 4}]
)
def test_every_layout_begins_with_the_same_weights(layout, tmp_path):
    """Each device reads its own part; here from bfloat16, in the names of the network."""
    arrays = {
        name: array.astype(jax.numpy.bfloat16) for name, array in begun(text_config(GPT)).items()
    }
    dotted = {name.replace("/", "."): array for name, array in arrays.items()}
    write_safetensors(path := tmp_path / "weights.safetensors", dotted)
    tables = {"layout": layout, "batch": {"global_batch": 8, "microbatches": 2}}
    config = text_config(GPT, seed=1, start={"weights": str(path)}, **tables)

    found = begun(config, 8)
    assert all(np.array_equal(found[name], arrays[name].astype(np.float32)) for name in arrays)


def test_the_newest_checkpoint_that_verifies_is_taken(earlier, tmp_path):
    """Of a run that did not end; one that is damaged is passed over."""
    folder = shutil.copytree(earlier, tmp_path / "run")
    shutil.rmtree(folder / "weights")
    config = image_config(start={"weights": str(folder)})
    start = start_of(resolve(config, 1))
    assert start is not None
    assert (start.source, start.step) == ("the checkpoint of step 8", 8)
    newest = begun(config)

    damaged = max((folder / "checkpoints/8").rglob("*"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    start = start_of(resolve(config, 1))
    assert start is not None
    assert start.step == 4
    assert any(not np.array_equal(newest[name], value) for name, value in begun(config).items())

    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ConfigError, match="no checkpoint that verifies"):
        start_of(resolve(config, 1))


def test_damaged_weights_are_refused(earlier, tmp_path):
    """By their checksums, whatever part of the files it is."""
    folder = shutil.copytree(earlier, tmp_path / "run")
    damaged = max((folder / "weights").rglob("*"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(ConfigError, match=r"start\.weights is refused"):
        begun(image_config(start={"weights": str(folder)}))


def test_a_head_of_other_classes_begins_anew(earlier):
    """Where the file says so; else it is refused by name and shape, before anything is read."""
    config = image_config(6, start={"weights": str(earlier)})
    with pytest.raises(ConfigError, match=r"of another shape: .*head.* 4 there, .* 6 here"):
        start_of(resolve(config, 1))

    (head,) = {name.partition("/")[0] for name in begun(image_config()) if "head" in name}
    config = with_fields(config, {"start.reinitialized": [head]})
    ended = trained_weights(resolve(image_config(), 1), earlier)
    expected, found, fresh = named(ended["params"]), begun(config), begun(image_config(6))
    for name, array in named(init_params(config)).items():
        of = fresh if name.startswith(head) else expected
        assert np.array_equal(found[name], of[name]), array.shape
    start = start_of(resolve(config, 1))
    assert start is not None
    assert start.reinitialized
    assert all(name.startswith(head) for name in start.reinitialized)


def init_params(config: RunConfig) -> Any:
    """Parameters before the first update."""
    run = resolve(config, 1)
    return init_state(run, build_mesh(run.layout)).params


def test_what_does_not_fit_is_named(earlier, tmp_path):
    """What is missing, what is too much, and what is no weights at all."""
    arrays = begun(text_config(GPT))
    moved = {**arrays, "blocks/other": arrays["norm/scale"]}
    del moved["norm/scale"]
    write_safetensors(path := tmp_path / "x.safetensors", moved)
    with pytest.raises(ConfigError, match=r"lacks norm/scale; too much: blocks/other"):
        start_of(resolve(text_config(GPT, start={"weights": str(path)}), 1))

    config = text_config(GPT, start={"weights": str(earlier)})
    with pytest.raises(ConfigError, match=r"the weights there are not those of model.name='gpt'"):
        start_of(resolve(config, 1))

    part = {"weights": str(earlier), "reinitialized": ["haed"]}
    with pytest.raises(
        ConfigError, match=r"start.reinitialized='haed' is refused: the network has"
    ):
        start_of(resolve(image_config(start=part), 1))

    for weights, words in (
        (str(tmp_path / "none"), "there is no run"),
        ("s3://x/y", "read from this machine's disk"),
    ):
        with pytest.raises(ConfigError, match=words):
            start_of(resolve(text_config(GPT, start={"weights": weights}), 1))


@pytest.mark.parametrize("cut", [0, 4, 40, 300, -8])
def test_a_cut_safetensors_file_is_refused(cut, tmp_path):
    """Wherever it is cut."""
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": np.ones((3, 4), np.float32), "b": np.ones(100, np.float32)})
    assert read_safetensors(path)["a"].sum() == 12
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        read_safetensors(path)


# Models of a hub, against what their code computes.


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of [heads, tokens, size]."""
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    return softmax(np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)) @ v


def gpt2_logits(t: dict[str, np.ndarray], tokens: np.ndarray, heads: int) -> np.ndarray:
    """As `modeling_gpt2.py` of transformers computes them, for one text."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    def conv1d(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(tokens), heads, -1).transpose(1, 0, 2)

    x = t["transformer.wte.weight"][tokens] + t["transformer.wpe.weight"][: len(tokens)]
    for layer in range(2):
        at = f"transformer.h.{layer}."
        q, k, v = np.split(conv1d(norm(x, f"{at}ln_1"), f"{at}attn.c_attn"), 3, axis=-1)
        mixed = attended(split(q), split(k), split(v)).transpose(1, 0, 2).reshape(x.shape)
        x = x + conv1d(mixed, f"{at}attn.c_proj")
        up = conv1d(norm(x, f"{at}ln_2"), f"{at}mlp.c_fc")
        new = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + conv1d(new, f"{at}mlp.c_proj")
    return norm(x, "transformer.ln_f") @ t["transformer.wte.weight"].T


def llama_logits(t: dict[str, np.ndarray], tokens: np.ndarray, heads: int) -> np.ndarray:
    """As `modeling_llama.py` of transformers computes them (of Qwen with biases or norms of heads),
    for one text."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * t[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0)

    def split(x: np.ndarray, count: int) -> np.ndarray:
        return x.reshape(len(tokens), count, -1).transpose(1, 0, 2)

    def rotated(x: np.ndarray) -> np.ndarray:
        size = x.shape[-1]
        turns = 1 / 10_000.0 ** (np.arange(0, size, 2) / size)
        angles = np.concatenate([np.outer(np.arange(len(tokens)), turns)] * 2, axis=-1)
        half = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
        return x * np.cos(angles) + half * np.sin(angles)

    x = t["model.embed_tokens.weight"][tokens]
    for layer in range(2):
        at = f"model.layers.{layer}."
        y = norm(x, f"{at}input_layernorm")
        q = split(linear(y, f"{at}self_attn.q_proj"), heads)
        k, v = (split(linear(y, f"{at}self_attn.{each}_proj"), 2) for each in "kv")
        if f"{at}self_attn.q_norm.weight" in t:
            q, k = norm(q, f"{at}self_attn.q_norm"), norm(k, f"{at}self_attn.k_norm")
        k, v = (np.repeat(each, heads // 2, axis=0) for each in (rotated(k), v))
        mixed = attended(rotated(q), k, v).transpose(1, 0, 2).reshape(x.shape)
        x = x + linear(mixed, f"{at}self_attn.o_proj")
        y = norm(x, f"{at}post_attention_layernorm")
        gate = linear(y, f"{at}mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * linear(y, f"{at}mlp.up_proj")
        x = x + linear(inner, f"{at}mlp.down_proj")
    return norm(x, "model.norm") @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a GPT-2 of two layers, a buffer of older versions among them."""
    of_layer = {
        **{"ln_1.weight": (16,), "ln_1.bias": (16,), "ln_2.weight": (16,), "ln_2.bias": (16,)},
        **{"attn.c_attn.weight": (16, 48), "attn.c_attn.bias": (48,), "attn.bias": (1, 1, 6, 6)},
        **{"attn.c_proj.weight": (16, 16), "attn.c_proj.bias": (16,)},
        **{"mlp.c_fc.weight": (16, 64), "mlp.c_fc.bias": (64,)},
        **{"mlp.c_proj.weight": (64, 16), "mlp.c_proj.bias": (16,)},
    }
    return {
        "transformer.wte.weight": (VOCABULARY, 16),
        "transformer.wpe.weight": (TOKENS, 16),
        "transformer.ln_f.weight": (16,),
        "transformer.ln_f.bias": (16,),
        "lm_head.weight": (VOCABULARY, 16),
        **{f"transformer.h.{n}.{name}": s for n in range(2) for name, s in of_layer.items()},
    }


def llama_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a network of the Llama family of two layers."""
    of_layer = {
        **{"input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,)},
        **{"self_attn.q_proj.weight": (16, 16), "self_attn.k_proj.weight": (8, 16)},
        **{"self_attn.v_proj.weight": (8, 16), "self_attn.o_proj.weight": (16, 16)},
        **{"mlp.gate_proj.weight": (24, 16), "mlp.up_proj.weight": (24, 16)},
        "mlp.down_proj.weight": (16, 24),
    }
    if kind == "qwen2":
        sizes = zip("qkv", (16, 8, 8), strict=True)
        of_layer |= {f"self_attn.{each}_proj.bias": (size,) for each, size in sizes}
    if kind == "qwen3":
        of_layer |= {f"self_attn.{each}_norm.weight": (4,) for each in "qk"}
    return {
        "model.embed_tokens.weight": (VOCABULARY, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (VOCABULARY, 16),
        **{f"model.layers.{n}.{name}": s for n in range(2) for name, s in of_layer.items()},
    }


LLAMA_JSON = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
}
GPT_JSON = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
HUBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (GPT, GPT_JSON),
    "llama": (LLAMA, LLAMA_JSON),
    "qwen2": ({**LLAMA, "block": {"qkv_bias": True}}, LLAMA_JSON | {"model_type": "qwen2"}),
    "qwen3": ({**LLAMA, "block": {"qk_norm": "head"}}, LLAMA_JSON | {"model_type": "qwen3"}),
}


def hub_folder(folder: Path, kind: str, described: dict[str, Any]) -> dict[str, np.ndarray]:
    """Write a model of random weights as a hub has it, in two files; its tensors."""
    generator = np.random.default_rng(3)
    shapes = gpt2_shapes() if kind == "gpt2" else llama_shapes(kind)
    tensors = {
        name: (generator.normal(size=shape) * 0.3 + ("norm" in name or "ln_" in name)).astype("f4")
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described))
    files = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for number, (name, array) in enumerate(tensors.items()):
        files[list(files)[number % 2]][name] = array
    for file, arrays in files.items():
        write_safetensors(folder / file, arrays)
    index = {name: file for file, arrays in files.items() for name in arrays}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tensors


@pytest.mark.parametrize("kind", HUBS)
def test_a_model_of_a_hub_computes_what_its_own_code_does(kind, tmp_path):
    """Loss over a batch, against NumPy in float64 written after transformers: every matrix is where
    it belongs, and turned as it must be."""
    model, described = HUBS[kind]
    tensors = hub_folder(tmp_path / "model", kind, described)
    config = text_config(model, start={"weights": str(tmp_path / "model")})
    run = resolve(config, 1)
    mesh = build_mesh(run.layout)
    generator = np.random.default_rng(0)
    inputs, targets = generator.integers(0, VOCABULARY, (2, 8, TOKENS)).astype(np.int32)

    evaluation = build_evaluation(run, mesh)
    batch = {"inputs": inputs, "targets": targets, "mask": np.ones(8, np.float32)}
    found = evaluation.function(*evaluation.weights(init_state(run, mesh)), batch)

    wide = {name: array.astype(np.float64) for name, array in tensors.items()}
    logits_of = gpt2_logits if kind == "gpt2" else llama_logits
    losses = []
    for text, target in zip(inputs, targets, strict=True):
        shares = softmax(logits_of(wide, text, model["heads"]))
        losses.append(-np.log(shares[np.arange(TOKENS), target]).mean())
    # A loss of 3 to 5 in float32 against float64, over some hundred roundings.
    assert float(found["loss_sum"].sum()) == pytest.approx(sum(losses), rel=2e-5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rope_theta": 500_000.0}, "model.rope_theta=10000.0 is refused"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 'rope_type = "llama3"'),
        ({"num_key_value_heads": 4}, "model.kv_heads=2 is refused"),
        ({"rms_norm_eps": 1e-6}, "model.norm_epsilon=1e-05 is refused"),
        ({"tie_word_embeddings": True}, "model.tied_embeddings=False is refused"),
        ({"model_type": "gemma3"}, 'holds a network of kind "gemma3"'),
        ({"model_type": "qwen2"}, "it lacks"),
    ],
)
def test_another_network_of_a_hub_is_refused(changed, words, tmp_path):
    """What shapes alone do not show is in its config.json; of the last the biases are missing."""
    described = {**LLAMA_JSON, **changed}
    hub_folder(tmp_path / "model", "llama", described)
    model = {**LLAMA, "block": {"qkv_bias": True}} if "qwen2" in str(changed) else LLAMA
    config = text_config(model, start={"weights": str(tmp_path / "model")})
    with pytest.raises(ConfigError, match=re.escape(words)):
        start_of(resolve(config, 1))


def test_weights_of_a_hub_are_of_no_parametrization(tmp_path):
    """Shapes are the same, and logits others; at its base it changes nothing."""
    hub_folder(tmp_path / "model", "llama", LLAMA_JSON)
    for base, accepts in ((4, False), (LLAMA["hidden"], True)):
        model = {**LLAMA, "parametrization": {"name": "mup", "base_hidden": base}}
        start = {"weights": str(tmp_path / "model")}
        run = resolve(text_config(model, start=start, optimizer={"name": "adamw"}), 1)
        if accepts:
            assert start_of(run) is not None
            continue
        with pytest.raises(ConfigError, match=r"model.parametrization.name='mup' is refused"):
            start_of(run)


def test_adapters_begin_beside_weights_that_are_given(tmp_path):
    """LoRA on a model of a hub: the base is the model's, in its own type, and B is zero."""
    model, described = HUBS["llama"]
    tensors = hub_folder(tmp_path / "model", "llama", described)
    tuning = {"lora": {"rank": 2}, "base_dtype": "bfloat16"}
    config = text_config(model, fine_tuning=tuning, start={"weights": str(tmp_path / "model")})
    found = begun(config)
    assert found["tokens/embedding"].dtype == jax.numpy.bfloat16
    assert np.array_equal(found["norm/scale"], tensors["model.norm.weight"])
    adapters = [array for name, array in found.items() if name.endswith("lora_b")]
    assert adapters
    assert not any(array.any() for array in adapters)
