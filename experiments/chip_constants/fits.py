"""Which constants of which chips are fitted to which rows of the ledger."""

from dataclasses import dataclass

from scalejax.validation.ledger import LedgerRow

IMAGES_AND_BERT = ("tensorflow_2017", "dlperf", "deep_learning_examples")
TRANSFORMERS = ("llm_foundry", "paxml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What is fitted for one chip, or for chips that differ in memory and clock alone."""

    chips: tuple[str, ...]
    """Names in the catalogue."""
    families: tuple[str, ...]
    """Families of the ledger's rows."""
    free: dict[str, tuple[float, float]]
    """(least, most) of each constant that is fitted, by its name in `attainable`."""
    most_devices: int = 8
    """Rows on more devices are left out: within a node, the network has no part."""
    typical_error: float = 0.1
    """Of a step's logarithm; errors beyond it count for less: a row may be a framework's bad
    day."""
    typical_scaling_error: float | None = None
    """The same of a step over that on fewest devices of its series, which every framework's
    series has a part in; None where these do not count."""


_EVERY_CHIP = {"contention_fraction": (0.0, 0.95), "step_cv": (0.0, 0.06)}
_DISPERSION = {"step_dispersion_seconds": (0.0, 5e-3)}
_WITHOUT_MATRIX_UNITS = {
    "convolution_fraction": (0.2, 0.9),
    "winograd_share": (0.0, 1.0),
    "memory_fraction": (0.3, 0.95),
    "launch_seconds": (1e-6, 50e-6),
    "step_overhead_seconds": (0.0, 10e-3),
    **_EVERY_CHIP,
}

FITS = {
    "k80": Fit(
        chips=("k80",),
        families=IMAGES_AND_BERT,
        free={**_WITHOUT_MATRIX_UNITS, "winograd_share": (0.0, 2.4)},
    ),
    "p100": Fit(
        chips=("p100",),
        families=IMAGES_AND_BERT,
        free=_WITHOUT_MATRIX_UNITS | _DISPERSION,
        typical_error=0.04,
        typical_scaling_error=0.01,
    ),
    "v100": Fit(
        chips=("v100", "v100-32gb", "v100-sxm3-32gb"),
        # Megatron's are the only long steps, which alone tell a share of the step from dispersion.
        families=(*IMAGES_AND_BERT, "megatron"),
        free={
            "matmul_fraction": (0.5, 0.95),
            "convolution_fraction": (0.2, 0.9),
            "convolution_f32_fraction": (0.2, 0.9),
            "winograd_share": (0.0, 1.0),
            "memory_fraction": (0.5, 0.95),
            "launch_seconds": (1e-6, 10e-6),
            "step_overhead_seconds": (0.0, 10e-3),
            **_DISPERSION,
            **_EVERY_CHIP,
        },
        typical_error=0.04,
        typical_scaling_error=0.01,
    ),
    "a100": Fit(
        chips=("a100-80gb", "a100-40gb"),
        families=(*IMAGES_AND_BERT, *TRANSFORMERS, "vtrain_single"),
        free={
            "matmul_fraction": (0.5, 0.95),
            "attention_fraction": (0.1, 0.9),
            "convolution_fraction": (0.2, 0.9),
            "convolution_f32_fraction": (0.1, 0.9),
            "memory_fraction": (0.5, 0.95),
            "launch_seconds": (0.0, 10e-6),
            "dispatch_seconds": (0.0, 60e-6),
            **_EVERY_CHIP,
        },
        most_devices=256,
    ),
    "h100": Fit(
        chips=("h100",),
        families=TRANSFORMERS,
        free={
            "sustained_fraction": (0.5, 1.0),
            "attention_fraction": (0.1, 0.9),
            "launch_seconds": (0.0, 10e-6),
            **_EVERY_CHIP,
        },
        most_devices=256,
    ),
}
"""By name. What has a source of its own, such as a table of measured products, is not free."""


def group(row: LedgerRow) -> str:
    """Name of the setting: rows that differ in the number of devices alone have the same."""
    return f"{row.model} {row.work.precision} {row.work.per_device_batch}"
