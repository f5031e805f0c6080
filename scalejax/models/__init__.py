"""The networks, one module each, with their partition rules over a mesh."""

from flax import nnx

from scalejax.config.data import DatasetFacts
from scalejax.config.model import (
    BertConfig,
    CnnConfig,
    CustomConfig,
    GptConfig,
    ImageNetworkConfig,
    LlamaConfig,
    MlpConfig,
    ModelConfig,
    ResNetConfig,
    VitConfig,
)
from scalejax.models.alexnet import AlexNet
from scalejax.models.bert import Bert
from scalejax.models.cnn import Cnn
from scalejax.models.efficientnet import EfficientNetLite
from scalejax.models.gpt import Gpt
from scalejax.models.inception import Inception
from scalejax.models.llama import Llama
from scalejax.models.mlp import Mlp
from scalejax.models.network import (
    Network,
    NetworkWithFeatures,
    PartitionRules,
    build_custom,
    import_network,
    param_specs,
    parameter_path,
)
from scalejax.models.normalization import BatchNorm, BatchNormScope
from scalejax.models.resnet import ResNet
from scalejax.models.vgg import Vgg
from scalejax.models.vit import Vit
from scalejax.models.xception import Xception

__all__ = [
    "BatchNorm",
    "BatchNormScope",
    "Network",
    "NetworkWithFeatures",
    "PartitionRules",
    "build_network",
    "is_cast",
    "network_class",
    "param_specs",
    "parameter_path",
]

IMAGE_NETWORKS = {
    "alexnet": AlexNet,
    "efficientnet_lite0": EfficientNetLite,
    "inception_v3": Inception,
    "vgg16": Vgg,
    "xception": Xception,
}
"""Class of each network that an `ImageNetworkConfig` names."""


def network_class(model: ModelConfig) -> type[Network]:
    """The class of the network that `model` names.

    Raises:
        ConfigError: if it is a user's own and cannot be imported.
    """
    match model:
        case MlpConfig():
            return Mlp
        case CnnConfig():
            return Cnn
        case ResNetConfig():
            return ResNet
        case ImageNetworkConfig():
            return IMAGE_NETWORKS[model.name]
        case GptConfig():
            return Gpt
        case LlamaConfig():
            return Llama
        case BertConfig():
            return Bert
        case VitConfig():
            return Vit
        case CustomConfig():
            return import_network(model.path)


def build_network(
    model: ModelConfig, dataset: DatasetFacts, *, bn: BatchNormScope, rngs: nnx.Rngs
) -> Network:
    """A network with fresh parameters, for the inputs and classes of `dataset`.

    Raises:
        ConfigError: if it is a user's own and cannot be imported or built.
    """
    match model:
        case MlpConfig():
            return Mlp(model, dataset, rngs=rngs)
        case CnnConfig():
            return Cnn(model, dataset, bn=bn, rngs=rngs)
        case ResNetConfig():
            return ResNet(model, dataset, bn=bn, rngs=rngs)
        case ImageNetworkConfig():
            return IMAGE_NETWORKS[model.name](model, dataset, bn=bn, rngs=rngs)
        case GptConfig():
            return Gpt(model, dataset, rngs=rngs)
        case LlamaConfig():
            return Llama(model, dataset, rngs=rngs)
        case BertConfig():
            return Bert(model, dataset, rngs=rngs)
        case VitConfig():
            return Vit(model, dataset, rngs=rngs)
        case CustomConfig():
            return build_custom(model, dataset, bn=bn, rngs=rngs)


def is_cast(model: ModelConfig, path: str) -> bool:
    """Whether the network uses a parameter only in the compute type, so that it may be gathered in
    that type; False for a user's own network, where this is unknown.

    Args:
        model: the network.
        path: path of the parameter.
    """
    return not isinstance(model, CustomConfig) and path.endswith(("kernel", "embedding"))
