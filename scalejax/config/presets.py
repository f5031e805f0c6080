"""Presets of published transformers, which `model.name` of a run may name.

A preset is a network and its sizes; any field beside the name replaces the published value. The
published vocabulary and context length are listed too, but belong to the data and are not set
(`data.vocabulary` and `data.tokens` of `synthetic_tokens`). No network is built here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scalejax.config.data import DatasetFacts
from scalejax.config.model import ModelConfig
from scalejax.core.errors import ConfigError, unknown_name
from scalejax.core.serialization import JsonValue, build


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published network."""

    network: str
    """Its architecture: the `model.name` of the config class."""
    sizes: Mapping[str, JsonValue] = field(default_factory=dict)
    """Other fields of the model; the others keep the defaults of the network."""
    vocabulary: int | None = None
    """Size of the vocabulary, as published; None for networks that read images."""
    tokens: int | None = None
    """Context length in tokens, as published; None for networks that read images."""
    parameters: int
    """Parameters, as published; with 1000 classes for images. The input embedding counts."""
    rounded_to: int = 1
    """Unit that `parameters` is rounded to; 1 if it is exact."""
    surplus: int = 0
    """Parameters of the network here less those published, where a layer differs from the
    published one."""
    active_parameters: int | None = None
    """Parameters that a token goes through, as published, of a mixture of experts; None for others,
    or if not published."""
    counts_embedding: bool = True
    """Whether `active_parameters` have the input embedding, of which a token reads one row;
    `parameters` always have it."""
    active_rounded_to: int = 1
    """Unit that `active_parameters` is rounded to."""
    source: str
    """Publication."""


def _gpt(
    layers: int, hidden: int, heads: int, parameters: int, rounded_to: int, **published: int | str
) -> Preset:
    """A gpt, GPT-2's vocabulary unless `published` says otherwise."""
    facts = {"vocabulary": 50_257, **published}
    sizes = {"layers": layers, "hidden": hidden, "heads": heads}
    return Preset(
        network="gpt",
        sizes=sizes,
        parameters=parameters,
        rounded_to=rounded_to,
        **facts,  # type: ignore[arg-type]  fields of a preset
    )


def _llama3(layers: int, hidden: int, heads: int, ffn_hidden: int, parameters: int) -> Preset:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8}
    return Preset(
        network="llama",
        sizes={**sizes, "ffn_hidden": ffn_hidden, "rope_theta": 500_000.0, "norm_epsilon": 1e-5},
        vocabulary=128_256,  # 128,000 tokens and 256 special ones
        tokens=8192,
        parameters=parameters,
        source="Grattafiori et al. 2024, arXiv 2407.21783, table 3; parameters of the checkpoints",
    )


def _vit(layers: int, hidden: int, heads: int, parameters: int) -> Preset:
    return Preset(
        network="vit",
        sizes={"patch": 16, "layers": layers, "hidden": hidden, "heads": heads},
        parameters=parameters,
        source="Dosovitskiy et al. 2020, arXiv 2010.11929, table 1; parameters of torchvision's, "
        "images of 224 x 224",
    )


def _llama31(layers: int, hidden: int, heads: int, ffn_hidden: int, parameters: int) -> Preset:
    """Llama 3 with the context of 3.1; its scaled angles are left out, as by the network."""
    return replace(_llama3(layers, hidden, heads, ffn_hidden, parameters), tokens=131_072)


def _qwen25(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn_hidden: int, parameters: int
) -> Preset:
    is_small = hidden <= 2048  # these tie the embeddings
    return Preset(
        network="llama",
        sizes={
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn_hidden": ffn_hidden,
            "rope_theta": 1e6,
            # of the base models' config.json
            "norm_epsilon": 1e-5 if hidden >= 5120 else 1e-6,
            "tied_embeddings": is_small,
            "block": {"qkv_bias": True},
        },
        vocabulary=151_936 if is_small else 152_064,
        tokens=32_768,
        parameters=parameters,
        source="Qwen Team 2024, arXiv 2412.15115, table 1; parameters of the checkpoints",
    )


def _qwen3(
    layers: int, hidden: int, heads: int, ffn_hidden: int, parameters: int, *, is_tied: bool = False
) -> Preset:
    return Preset(
        network="llama",
        sizes={
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": 8,
            "ffn_hidden": ffn_hidden,
            "rope_theta": 1e6,
            "norm_epsilon": 1e-6,
            "tied_embeddings": is_tied,
            "block": {"head_size": 128, "qk_norm": "head"},
        },
        vocabulary=151_936,
        tokens=32_768,
        parameters=parameters,
        source="Qwen Team 2025, arXiv 2505.09388, table 1; parameters of the checkpoints",
    )


def _gemma3(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn_hidden: int,
    parameters: int,
    rounded_to: int = 10**7,
    head_size: int = 256,
    window: int = 1024,
) -> Preset:
    """A Gemma 3 as pretrained with 32,768 tokens: afterwards the positions of global layers are
    divided by 8 from 4b on, here not. Scores are scaled by the root of the head size, which at 27b
    is 168 there (hidden / heads), and here 128."""
    block: JsonValue = {
        "head_size": head_size,
        "qk_norm": "head",
        "sliding_window": window,
        "global_every": 6,
        "local_rope_theta": 1e4,
        "activation": "gelu",
        "post_norms": True,
    }
    return Preset(
        network="llama",
        sizes={
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn_hidden": ffn_hidden,
            "rope_theta": 1e6,
            "norm_epsilon": 1e-6,
            "tied_embeddings": True,
            "scaled_embeddings": True,
            "block": block,
        },
        vocabulary=262_144,
        tokens=32_768,
        parameters=parameters,
        rounded_to=rounded_to,
        source="Gemma Team 2025, arXiv 2503.19786; the text model, sizes of the checkpoints",
    )


def _nemotron4(
    layers: int, hidden: int, heads: int, ffn_hidden: int, parameters: int, source: str
) -> Preset:
    return Preset(
        network="llama",
        sizes={
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": 8,
            "ffn_hidden": ffn_hidden,
            "rope_theta": 1e4,
            "block": {
                "activation": "squared_relu",
                "is_gated": False,
                "norm": "layer",
                "rope_fraction": 0.5,
            },
        },
        vocabulary=256_000,
        tokens=4096,
        parameters=parameters,
        rounded_to=10**8,
        source=source,
    )


def _mixture(
    layers: int,
    hidden: int,
    heads: int,
    moe: dict[str, JsonValue],
    *,
    vocabulary: int,
    tokens: int,
    parameters: int,
    rounded_to: int = 1,
    active: int | None,
    active_rounded_to: int = 10**8,
    counts_embedding: bool = True,
    source: str,
    surplus: int = 0,
    **sizes: JsonValue,
) -> Preset:
    """A mixture of experts; `ffn_hidden` is that of its dense layers, and unused without any.

    Weights of router losses are the network's defaults where none are given.
    """
    usual: dict[str, JsonValue] = {"kv_heads": heads, "ffn_hidden": moe["expert_hidden"]}
    return Preset(
        network="llama",
        sizes={"layers": layers, "hidden": hidden, "heads": heads, **usual, **sizes, "moe": moe},
        vocabulary=vocabulary,
        tokens=tokens,
        parameters=parameters,
        rounded_to=rounded_to,
        surplus=surplus,
        active_parameters=active,
        active_rounded_to=active_rounded_to,
        counts_embedding=counts_embedding,
        source=source,
    )


def _auxiliary_loss(weight: float, layers: int, experts_per_token: int) -> dict[str, JsonValue]:
    """A router with the weight of a config.json (`router_aux_loss_coef`), for the sum over layers.

    It is that of transformers' `load_balancing_loss_func`: a mean over layers, with shares of
    experts that sum to the experts per token. What Mistral and Qwen pretrained with is not
    published.
    """
    return {"auxiliary_loss_weight": weight * experts_per_token / layers}


def _experts(
    experts: int, experts_per_token: int, expert_hidden: int, **others: JsonValue
) -> dict[str, JsonValue]:
    counts = {"experts": experts, "experts_per_token": experts_per_token}
    return {**counts, "expert_hidden": expert_hidden, **others}


_MLA: dict[str, JsonValue] = {
    "kv_lora_rank": 512,
    "nope_head_size": 128,
    "rope_head_size": 64,
    "value_head_size": 128,
}
_MLA_OF_QUERIES: dict[str, JsonValue] = {**_MLA, "q_lora_rank": 1536}
_SIGMOID: dict[str, JsonValue] = {"scores": "sigmoid", "balance": "bias"}
_QWEN3_BLOCK: dict[str, JsonValue] = {"head_size": 128, "qk_norm": "head"}
_GPT_OSS_BLOCK: dict[str, JsonValue] = {
    "head_size": 64,
    "qkv_bias": True,
    "sliding_window": 128,
    "global_every": 2,
    "attention_sinks": True,
}


_GPT2 = "Radford et al. 2019, table 2; parameters of the published checkpoints"
_GPT3 = "Brown et al. 2020, arXiv 2005.14165, table 2.1"
_BERT = "Devlin et al. 2018, arXiv 1810.04805, section 3; parameters of BertForMaskedLM in \
Hugging Face's transformers, without the pooler"

PRESETS: dict[str, Preset] = {
    "gpt2-124m": _gpt(12, 768, 12, 124_439_808, 1, tokens=1024, source=_GPT2),
    "gpt2-355m": _gpt(24, 1024, 16, 354_823_168, 1, tokens=1024, source=_GPT2),
    "gpt2-774m": _gpt(36, 1280, 20, 774_030_080, 1, tokens=1024, source=_GPT2),
    "gpt2-1.5b": _gpt(48, 1600, 25, 1_557_611_200, 1, tokens=1024, source=_GPT2),
    "gpt3-125m": _gpt(12, 768, 12, 125_000_000, 10**6, tokens=2048, source=_GPT3),
    "gpt3-760m": _gpt(24, 1536, 16, 760_000_000, 10**6, tokens=2048, source=_GPT3),
    # 16 heads of 128: the table's 24 would be 3072 wide
    "gpt3-1.3b": _gpt(24, 2048, 16, 1_300_000_000, 10**8, tokens=2048, source=_GPT3),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2_700_000_000, 10**8, tokens=2048, source=_GPT3),
    "gpt3-6.7b": _gpt(32, 4096, 32, 6_700_000_000, 10**8, tokens=2048, source=_GPT3),
    # 40 heads of 128 are 5120: the table's 5140 is no multiple of its heads
    "gpt3-13b": _gpt(40, 5120, 40, 13_000_000_000, 10**9, tokens=2048, source=_GPT3),
    "gpt3-175b": _gpt(96, 12_288, 96, 175_000_000_000, 10**9, tokens=2048, source=_GPT3),
    # ALiBi, which has no parameters, replaced by learned positions; the norm of the embedding
    # left out
    "bloom-176b": _gpt(
        70,
        14_336,
        112,
        176_247_271_424,
        1,
        vocabulary=250_880,  # padded
        tokens=2048,
        surplus=2048 * 14_336 - 2 * 14_336,
        source="BigScience 2022, arXiv 2211.05100, table 3; parameters of the checkpoint",
    ),
    "llama3-8b": _llama3(32, 4096, 32, 14_336, 8_030_261_248),
    "llama3-70b": _llama3(80, 8192, 64, 28_672, 70_553_706_496),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248, 405_853_388_800),
    "llama3.1-8b": _llama31(32, 4096, 32, 14_336, 8_030_261_248),
    "llama3.1-70b": _llama31(80, 8192, 64, 28_672, 70_553_706_496),
    "llama3.1-405b": _llama31(126, 16_384, 128, 53_248, 405_853_388_800),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, 494_032_768),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, 1_543_714_304),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11_008, 3_085_938_688),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18_944, 7_615_616_512),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13_824, 14_770_033_664),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27_648, 32_763_876_352),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29_568, 72_706_203_648),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, 596_049_920, is_tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, 1_720_574_976, is_tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, 4_022_468_096, is_tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288, 8_190_735_360),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408, 14_768_307_200),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600, 32_762_123_264),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, 999_885_952, 1, window=512),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 10_240, 3_880_000_000),
    "gemma3-12b": _gemma3(48, 3840, 16, 8, 15_360, 11_770_000_000),
    "gemma3-27b": _gemma3(62, 5376, 32, 16, 21_504, 27_010_000_000, head_size=128),
    "nemotron4-15b": _nemotron4(
        32, 6144, 48, 24_576, 15_600_000_000, "Parmar et al. 2024, arXiv 2402.16819, table 1"
    ),
    "nemotron4-340b": _nemotron4(
        96, 18_432, 96, 73_728, 341_000_000_000, "NVIDIA 2024, arXiv 2406.11704, table 1"
    ),
    "mixtral-8x7b": _mixture(
        32,
        4096,
        32,
        _experts(8, 2, 14_336, router=_auxiliary_loss(0.02, 32, 2)),
        kv_heads=8,
        rope_theta=1e6,
        vocabulary=32_000,
        tokens=32_768,
        parameters=46_702_792_704,
        active=12_900_000_000,
        source="Jiang et al. 2024, arXiv 2401.04088, table 1; parameters of the checkpoint",
    ),
    "mixtral-8x22b": _mixture(
        56,
        6144,
        48,
        _experts(8, 2, 16_384, router=_auxiliary_loss(0.001, 56, 2)),
        kv_heads=8,
        rope_theta=1e6,
        vocabulary=32_000,
        tokens=65_536,
        parameters=140_620_634_112,
        active=39_000_000_000,
        active_rounded_to=10**9,
        source="Mistral AI, 17 April 2024, mixtral-8x22b; parameters of the checkpoint",
    ),
    # norms are LayerNorms without bias there, here RMSNorms; queries, keys and values are clipped
    # to 8 there, here not
    "dbrx": _mixture(
        40,
        6144,
        48,
        _experts(16, 4, 10_752),
        kv_heads=8,
        rope_theta=5e5,
        vocabulary=100_352,
        tokens=32_768,
        parameters=132_000_000_000,
        rounded_to=10**9,
        active=36_000_000_000,
        active_rounded_to=10**9,
        source="Databricks, 27 March 2024, introducing DBRX; sizes of the checkpoint",
    ),
    # the router keeps the scores of a softmax over all experts; its losses (section 2: 0.01 and
    # 0.001) are means over the 16 layers in its code (MegaBlocks), and the z-loss over the 8
    # experts of a token too
    "olmoe-7b-1b": _mixture(
        16,
        2048,
        16,
        _experts(
            64,
            8,
            1024,
            router={
                "normalise_weights": False,
                "auxiliary_loss_weight": 0.01 / 16,
                "z_loss_weight": 0.001 / 16 / 8,
            },
        ),
        block={"qk_norm": "all_heads"},
        rope_theta=1e4,
        vocabulary=50_304,
        tokens=4096,
        parameters=6_919_161_856,
        active=1_300_000_000,
        source="Muennighoff et al. 2024, arXiv 2409.02060, table 1; parameters of the checkpoint",
    ),
    "qwen3-30b-a3b": _mixture(
        48,
        2048,
        32,
        _experts(128, 8, 768, router=_auxiliary_loss(0.001, 48, 8)),
        kv_heads=4,
        block=_QWEN3_BLOCK,
        rope_theta=1e6,
        norm_epsilon=1e-6,
        vocabulary=151_936,
        tokens=32_768,
        parameters=30_532_122_624,
        active=3_300_000_000,
        source="Qwen Team 2025, arXiv 2505.09388, table 2; parameters of the checkpoint",
    ),
    "qwen3-235b-a22b": _mixture(
        94,
        4096,
        64,
        _experts(128, 8, 1536, router=_auxiliary_loss(0.001, 94, 8)),
        kv_heads=4,
        block=_QWEN3_BLOCK,
        rope_theta=1e6,
        norm_epsilon=1e-6,
        vocabulary=151_936,
        tokens=32_768,
        parameters=235_093_634_560,
        active=22_000_000_000,
        active_rounded_to=10**9,
        source="Qwen Team 2025, arXiv 2505.09388, table 2; parameters of the checkpoint",
    ),
    "deepseek-v2-lite": _mixture(
        27,
        2048,
        16,
        _experts(
            64, 6, 1408, shared_experts=2, dense_layers=1, router={"normalise_weights": False}
        ),
        ffn_hidden=10_944,
        mla=_MLA,
        rope_theta=1e4,
        norm_epsilon=1e-6,
        vocabulary=102_400,
        tokens=32_768,
        parameters=15_706_484_224,
        active=2_400_000_000,
        counts_embedding=False,
        source="DeepSeek-AI 2024, arXiv 2405.04434, appendix B; parameters of the checkpoint",
    ),
    # without multi-token prediction; the bias of experts is no parameter here, but a statistic
    "deepseek-v3": _mixture(
        61,
        7168,
        128,
        _experts(
            256,
            8,
            2048,
            shared_experts=1,
            dense_layers=3,
            router={**_SIGMOID, "scaling": 2.5, "groups": 8, "groups_per_token": 4},
        ),
        ffn_hidden=18_432,
        mla=_MLA_OF_QUERIES,
        rope_theta=1e4,
        norm_epsilon=1e-6,
        vocabulary=129_280,
        tokens=4096,
        parameters=671_026_419_200,
        surplus=-58 * 256,
        active=37_000_000_000,
        counts_embedding=False,
        active_rounded_to=10**9,
        source="DeepSeek-AI 2024, arXiv 2412.19437, section 4.2; parameters of the checkpoint",
    ),
    "kimi-k2": _mixture(
        61,
        7168,
        64,
        _experts(
            384,
            8,
            2048,
            shared_experts=1,
            dense_layers=1,
            router={**_SIGMOID, "scaling": 2.827},
        ),
        ffn_hidden=18_432,
        mla=_MLA_OF_QUERIES,
        rope_theta=5e4,
        norm_epsilon=1e-6,
        vocabulary=163_840,
        tokens=4096,
        parameters=1_026_408_232_448,
        surplus=-60 * 384,
        active=32_000_000_000,
        counts_embedding=False,
        active_rounded_to=10**9,
        source="Kimi Team 2025, arXiv 2507.20534, table 2, which says 1.04e12 and 32.6e9; "
        "parameters of the checkpoint, and active ones of its card",
    ),
    # without the biases of projection, router and experts: 0.04 %; gated by SiLU, there by a
    # clamped one with one added to the other half; positions are not scaled (YaRN) here
    "gpt-oss-20b": _mixture(
        24,
        2880,
        64,
        _experts(32, 4, 2880),
        kv_heads=8,
        block=_GPT_OSS_BLOCK,
        rope_theta=1.5e5,
        vocabulary=201_088,
        tokens=131_072,
        parameters=20_910_000_000,
        rounded_to=10**7,
        active=3_610_000_000,
        counts_embedding=False,
        active_rounded_to=10**7,
        source="OpenAI 2025, arXiv 2508.10925, table 1",
    ),
    "gpt-oss-120b": _mixture(
        36,
        2880,
        64,
        _experts(128, 4, 2880),
        kv_heads=8,
        block=_GPT_OSS_BLOCK,
        rope_theta=1.5e5,
        vocabulary=201_088,
        tokens=131_072,
        parameters=116_830_000_000,
        rounded_to=10**7,
        active=5_130_000_000,
        counts_embedding=False,
        active_rounded_to=10**7,
        source="OpenAI 2025, arXiv 2508.10925, table 1",
    ),
    # the text model, without 0.87e9 that see; rotated in every layer, not attending in chunks, and
    # without the norm of queries and keys, which has no parameters; a score multiplies the output
    # of an expert, there its input
    "llama4-scout": _mixture(
        48,
        5120,
        40,
        _experts(
            16, 1, 8192, shared_experts=1, router={"scores": "sigmoid", "normalise_weights": False}
        ),
        kv_heads=8,
        rope_theta=5e5,
        vocabulary=202_048,
        tokens=8192,
        parameters=109_000_000_000,
        rounded_to=10**9,
        surplus=-870_000_000,
        active=17_000_000_000,
        counts_embedding=False,
        active_rounded_to=10**9,
        source="Meta, 5 April 2025, The Llama 4 herd; sizes of the checkpoint",
    ),
    # experts are gated by GELU there, scores are capped at 30 by a tanh, and logits are multiplied
    # by 0.577, here not; active parameters were published as a share alone, a quarter
    "grok-1": _mixture(
        64,
        6144,
        48,
        _experts(8, 2, 32_768, router={"normalise_weights": False}),
        kv_heads=8,
        rope_theta=1e4,
        tied_embeddings=True,
        scaled_embeddings=True,
        block={"post_norms": True},
        vocabulary=131_072,
        tokens=8192,
        parameters=314_000_000_000,
        rounded_to=10**9,
        active=None,
        source="xAI, 17 March 2024, github.com/xai-org/grok-1",
    ),
    "bert-base": Preset(
        network="bert_base",
        vocabulary=30_522,
        tokens=512,
        parameters=109_514_298,
        source=_BERT,
    ),
    "bert-large": Preset(
        network="bert_large",
        vocabulary=30_522,
        tokens=512,
        parameters=335_174_458,
        source=_BERT,
    ),
    "vit-b/16": _vit(12, 768, 12, 86_567_656),
    "vit-l/16": _vit(24, 1024, 16, 304_326_632),
}
"""The presets by name."""


def with_preset(tables: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The tables of a run with a preset of the model expanded into its fields.

    Args:
        tables: of a `run.toml`; not modified.

    Raises:
        ConfigError: if there is neither a network nor a published one of that name.
    """
    model = tables.get("model")
    if not isinstance(model, dict):
        return tables
    return {**tables, "model": _spelled_out(model)}


def published_model(name: str, **replaced: JsonValue) -> ModelConfig:
    """The config of the preset `name`, with fields replaced.

    Raises:
        ConfigError: if there is no such name or field.
    """
    if name not in PRESETS:
        raise ConfigError(unknown_name("model.name", name, PRESETS))
    return build(ModelConfig, _spelled_out({"name": name, **replaced}), where="model")


def costed_note(name: str | None, model: ModelConfig, dataset: DatasetFacts) -> str | None:
    """A note on settings in which a costed preset differs from the published network; None if it
    does not.

    Compares vocabulary and context length, which a preset does not set, and names the compute type
    if it is float32, in which networks of published sizes are not trained.

    Args:
        name: `model.name` as it was given.
        model: its config.
        dataset: the data set it is trained on.
    """
    preset = PRESETS.get(name or "")
    if preset is None:
        return None
    parts = []
    if preset.vocabulary is not None:
        parts.append(_beside("vocabulary", dataset.classes, preset.vocabulary))
    if preset.tokens is not None:
        parts.append(_beside("tokens", dataset.input_shape[0], preset.tokens))
    is_as_published = not any("published" in part for part in parts)
    if is_as_published and model.compute_dtype != "float32":
        return None
    return f"costs {', '.join((*parts, model.compute_dtype))}"


def _beside(what: str, given: int, published: int) -> str:
    return f"{what} {given}" + ("" if given == published else f" (published: {published})")


def _spelled_out(model: dict[str, JsonValue]) -> dict[str, JsonValue]:
    name = model.get("name")
    if not isinstance(name, str) or name in ModelConfig.names():
        return model  # an invalid name is refused when the config is built
    if name not in PRESETS:
        raise ConfigError(unknown_name("model.name", name, [*ModelConfig.names(), *PRESETS]))
    given = {key: value for key, value in model.items() if key != "name" and value is not None}
    return {"name": PRESETS[name].network, **_with_given(PRESETS[name].sizes, given)}


def _with_given(
    published: Mapping[str, JsonValue], given: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """`published` with the fields that are given; of tables, the fields of theirs."""
    sizes = dict(published)
    for key, value in given.items():
        of_table = sizes.get(key)
        is_table = isinstance(of_table, dict) and isinstance(value, dict)
        sizes[key] = _with_given(of_table, value) if is_table else value  # type: ignore[arg-type]
    return sizes
