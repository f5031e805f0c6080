"""What every network owes the rest: paths, shapes, types, partition rules, clear refusals."""

import dataclasses
import re
import sys
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from scalejax.config.data import (
    FashionMnistConfig,
    MaskedTokensConfig,
    SyntheticImagesConfig,
    SyntheticTokensConfig,
)
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.model import (
    BertConfig,
    BlockConfig,
    CnnConfig,
    CustomConfig,
    GptConfig,
    ImageNetworkConfig,
    LlamaConfig,
    MlaConfig,
    MlpConfig,
    ModelConfig,
    MtpConfig,
    ResNetConfig,
    VitConfig,
)
from scalejax.config.moe import MoeConfig
from scalejax.config.parallelism import Layout
from scalejax.core.errors import ConfigError
from scalejax.data.facts import read_facts
from scalejax.models import (
    BatchNormScope,
    Network,
    build_network,
    network_class,
    param_specs,
    parameter_path,
)
from scalejax.models.sharding import constrained_by_row
from scalejax.training.mesh import build_mesh

FASHION = read_facts(FashionMnistConfig(edition="embedded"))
TOKENS = read_facts(SyntheticTokensConfig(tokens=8, vocabulary=32))
HIDDEN = read_facts(MaskedTokensConfig(tokens=8, masked=2, vocabulary=32))
PHOTOGRAPHS = read_facts(SyntheticImagesConfig(image_size=75, classes=8))
AXIS_SIZES = {"pipeline": 1, "data": 2, "fsdp": 2, "context": 1, "tensor": 2}
SMALL = [
    pytest.param(MlpConfig(hidden=(16, 8)), FASHION, id="mlp"),
    pytest.param(CnnConfig(channels=(4, 8)), FASHION, id="cnn"),
    pytest.param(ResNetConfig(name="resnet18"), FASHION, id="resnet18"),
    pytest.param(GptConfig(layers=2, hidden=16, heads=2), TOKENS, id="gpt"),
    pytest.param(
        LlamaConfig(layers=2, hidden=16, heads=4, kv_heads=2, ffn_hidden=32), TOKENS, id="llama"
    ),
    pytest.param(VitConfig(patch=7, layers=2, hidden=32, heads=2), FASHION, id="vit"),
    pytest.param(
        BertConfig(name="bert_base", layers=2, hidden=16, heads=2, max_tokens=8), HIDDEN, id="bert"
    ),
    *(
        pytest.param(ImageNetworkConfig(name=name, width=1 / 4), PHOTOGRAPHS, id=name)
        for name in ("alexnet", "vgg16", "inception_v3", "xception")
    ),
    # wider, for its depthwise kernels, which are whole everywhere, to be a small part
    pytest.param(
        ImageNetworkConfig(name="efficientnet_lite0", width=1 / 2),
        PHOTOGRAPHS,
        id="efficientnet_lite0",
    ),
]

_LLAMA = LlamaConfig(layers=2, hidden=16, heads=4, kv_heads=2, ffn_hidden=32)
LLAMA_OPTIONS = (
    dataclasses.replace(_LLAMA, moe=MoeConfig(experts=4, expert_hidden=8, shared_experts=1)),
    dataclasses.replace(
        _LLAMA,
        kv_heads=4,
        mla=MlaConfig(
            q_lora_rank=8, kv_lora_rank=8, nope_head_size=4, rope_head_size=2, value_head_size=4
        ),
        mtp=MtpConfig(),
    ),
    dataclasses.replace(
        _LLAMA,
        block=BlockConfig(
            qkv_bias=True, activation="squared_relu", is_gated=False, attention_sinks=True
        ),
    ),
)
"""Options of llama that have parameters, and partition rules, of their own."""


def build(model: ModelConfig, dataset: DatasetFacts) -> Network:
    """A network with seed 0."""
    return build_network(model, dataset, bn=BatchNormScope(), rngs=nnx.Rngs(0))


def params_of(network: Network) -> dict:
    """Parameters by path."""
    return nnx.to_pure_dict(nnx.state(network, nnx.Param))


@cache
def shapes_of(model: ModelConfig, dataset: DatasetFacts) -> dict:
    """Shapes of parameters by path; nothing is computed."""
    return params_of(nnx.eval_shape(lambda: build(model, dataset)))


def paths_of(params: dict) -> list[str]:
    """All paths, joined."""
    return [parameter_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


@pytest.mark.parametrize(
    ("model", "dataset", "compute_dtype"),
    [
        pytest.param(*case.values, dtype, id=f"{case.id}-{dtype}")
        for index, case in enumerate(SMALL)
        # The widest type and the narrowest where nothing is cast, or little is traced.
        for dtype in (("float32", "bfloat16", "float16") if index < 4 else ("bfloat16",))
    ],
)
def test_logits_and_parameters_are_float32(model, dataset, compute_dtype):
    """One logit per class for every target, whatever the compute type."""
    model = dataclasses.replace(model, compute_dtype=compute_dtype)
    inputs = jnp.zeros((2, *dataset.input_shape), jnp.int32 if dataset.is_text else jnp.float32)

    def built_and_applied():
        network = build(model, dataset)
        where = {"places": jnp.zeros((2, 2), jnp.int32)} if dataset.is_masked else {}
        return network, network(inputs, is_training=True, **where)

    network, logits = nnx.eval_shape(built_and_applied)

    assert logits.shape == (2, *dataset.target_shape, dataset.classes)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(params_of(network))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("model", "dataset"), SMALL)
def test_only_weights_end_in_kernel_or_embedding(model, dataset):
    """The rule by which optimizers know weights from biases and normalisation."""
    shapes = shapes_of(model, dataset)
    stacked = network_class(model).stacked

    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = parameter_path(path)
        dimensions = len(leaf.shape) - (name.split("/")[0] in stacked)
        is_weight = name.rpartition("/")[2] in ("kernel", "embedding")
        assert is_weight or name.rpartition("/")[2] in ("scale", "bias"), name
        if is_weight:
            assert dimensions >= 2, name


@pytest.mark.parametrize(("model", "dataset"), SMALL)
def test_every_partition_rule_matches_and_large_weights_are_split(model, dataset):
    """No rule is dead, and no weight of a hidden layer is left whole on fsdp or tensor."""
    shapes = shapes_of(model, dataset)
    options = LLAMA_OPTIONS if isinstance(model, LlamaConfig) else ()
    paths = {path for each in (model, *options) for path in paths_of(shapes_of(each, dataset))}
    for pattern, _ in network_class(model).partition_rules():
        assert any(re.search(pattern, path) for path in paths), pattern

    specs = param_specs(shapes, network_class(model).partition_rules(), AXIS_SIZES)
    for axis in ("fsdp", "tensor"):
        whole = [
            leaf.size
            for leaf, spec in zip(jax.tree.leaves(shapes), _leaves(specs), strict=True)
            if axis not in jax.tree.leaves(tuple(spec))
        ]
        total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert sum(whole) < 0.2 * total, axis  # stems, heads of odd width, biases


def _leaves(specs: dict) -> list[P]:
    return jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P))


def test_first_matching_rule_wins_and_odd_dimensions_stay_whole():
    """By hand, on five parameters; of several axes that do not divide, the minor one goes first."""
    shape = jax.ShapeDtypeStruct
    params = {
        "a": {"kernel": shape((4, 6), jnp.float32)},
        "b": {"kernel": shape((4, 5), jnp.float32)},
        "c": {"embedding": shape((8, 3), jnp.float32)},
        "d": {"embedding": shape((6, 3), jnp.float32)},
        "norm": {"scale": shape((4,), jnp.float32)},
    }
    rules = (
        (r"^a/kernel$", P("tensor", None)),
        (r"kernel$", P("fsdp", "tensor")),
        (r"embedding$", P(("tensor", "fsdp"), None)),
    )

    specs = param_specs(params, rules, {"data": 1, "fsdp": 4, "tensor": 2})

    assert specs == {
        "a": {"kernel": P("tensor", None)},
        "b": {"kernel": P("fsdp", None)},
        "c": {"embedding": P(("tensor", "fsdp"), None)},
        "d": {"embedding": P("tensor", None)},
        "norm": {"scale": P()},
    }


def test_a_rule_that_cannot_hold_is_refused():
    """An unknown axis, and more dimensions than the parameter has."""
    params = {"kernel": jax.ShapeDtypeStruct((4,), jnp.float32)}

    with pytest.raises(ConfigError, match=r"'tensr' is refused.*did you mean 'tensor'"):
        param_specs(params, ((r"kernel", P("tensr")),), AXIS_SIZES)
    with pytest.raises(ConfigError, match="has 1 dimensions, its partition rule 2"):
        param_specs(params, ((r"kernel", P(None, "tensor")),), AXIS_SIZES)


def test_rows_are_placed_only_where_the_mesh_is_known():
    """The constraint appears under a mesh of ours, and is absent without one."""
    mesh = build_mesh(Layout(data=2, fsdp=2, tensor=2))
    rows = jax.ShapeDtypeStruct((8, 4), jnp.float32)

    def under_mesh(rows):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return constrained_by_row(rows)

    assert "sharding_constraint" in str(jax.make_jaxpr(under_mesh)(rows))
    assert "sharding_constraint" not in str(jax.make_jaxpr(constrained_by_row)(rows))


CUSTOM_MODULE = """
import jax.numpy as jnp
from flax import nnx
from scalejax.models import Network

class Tiny(Network):
    def __init__(self, dataset, *, compute_dtype, bn, rngs, width=4):
        self.dense = nnx.Linear(28 * 28, dataset.classes, rngs=rngs)
        self.width = width

    def __call__(self, inputs, *, is_training):
        return self.dense(inputs.reshape(inputs.shape[0], -1))

class Stranger(nnx.Module):
    pass

class Unfinished(Network):
    pass
"""


@pytest.fixture
def custom_module(tmp_path, monkeypatch):
    """A user's module in the working directory; its name is this test's own."""
    name = f"networks_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CUSTOM_MODULE)
    (tmp_path / f"broken_{name}.py").write_text("import no_such_module_anywhere")
    (tmp_path / f"raises_{name}.py").write_text("int('x')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return name


def test_a_users_own_network_is_built_with_its_options(custom_module):
    """Found in the working directory, by path, options as keyword arguments."""
    model = CustomConfig(path=f"{custom_module}:Tiny", options={"width": 7})

    network = build(model, FASHION)

    assert vars(network)["width"] == 7
    assert network(jnp.zeros((2, 28, 28, 1)), is_training=True).shape == (2, 10)
    assert network_class(model).partition_rules() == ()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Tiny", "'no_such_module', installed or in .* must import"),
        ("broken_{}:Tiny", "must import, but .*no_such_module_anywhere"),
        ("raises_{}:Tiny", "must import, but ValueError: "),
        ("{}:Tinny", "did you mean '.*:Tiny'"),
        ("{}:Stranger", r"Stranger must be a subclass of scalejax\.models\.Network"),
        ("{}:Unfinished", r"Unfinished must define __call__\(self, inputs, \*, is_training\)"),
    ],
)
def test_what_is_no_network_is_refused(custom_module, path, message):
    """One sentence each for a missing module, a broken one, a missing class, another class, and
    one that lacks what every network has."""
    with pytest.raises(ConfigError, match=message):
        network_class(CustomConfig(path=path.format(custom_module)))


def test_an_option_that_the_class_does_not_take_is_refused(custom_module):
    """By name, before the class is called."""
    model = CustomConfig(path=f"{custom_module}:Tiny", options={"depth": 2})

    with pytest.raises(ConfigError, match=r"model\.options=.*unexpected keyword argument 'depth'"):
        build(model, FASHION)


def test_a_network_that_takes_no_places_is_refused_hidden_words(custom_module):
    """Before it is traced, and the reason is told."""
    model = CustomConfig(path=f"{custom_module}:Tiny")

    with pytest.raises(ConfigError, match=r"model\.path=.*called with places=.*unexpected keyword"):
        build(model, HIDDEN)


def test_images_of_any_size_and_colour_are_taken():
    """Convolutional networks average over places, so only the stem sees the image's shape."""
    dataset = read_facts(SyntheticImagesConfig(image_size=32, channels=3, classes=7))

    logits = nnx.eval_shape(
        lambda: build(CnnConfig(channels=(4,)), dataset)(
            jnp.zeros((2, 32, 32, 3)), is_training=True
        )
    )

    assert logits.shape == (2, 7)


def test_a_model_without_a_network_is_named():
    """As members of other families are that nothing builds."""
    with pytest.raises(NotImplementedError, match="network is not registered for ModelConfig"):
        network_class(ModelConfig(name="unknown"))  # type: ignore[call-arg]
