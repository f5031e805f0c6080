"""Seconds of a grouped matrix product, in which each group of rows has its own matrix.

The groups are the experts on a device, and the rows the tokens that were routed to them. The model
is a roofline in which the rows of each group are rounded up to a tile, every group's matrix is
moved, and every group adds a little time. Its constants were fitted to measured layers of experts,
forward (`hardware/grouped_matmul_rates/`, `experiments/grouped_products`); other chips use those of
plain products. Depends on chips and shapes, not on programs.

Gradients were not measured and are derived. The input gradient multiplies the same rows by the same
matrices transposed, so it is costed as the forward product with the widths swapped. The weight
gradient sums over the rows of each group: the rows, rounded up, are the inner side, and a matrix
for each group is written. Left out: the ramp of many small sums over few rows, and splitting them;
a kernel that reaches half of the forward rate there would make a step that is two thirds experts
about a fifth slower. Skew between the groups of one device is left out too: with the power laws of
`expert_load` it adds 3 to 12 % in the median (the same experiment, one device).
"""

import math
from dataclasses import dataclass

from scalejax.core.errors import require_at_least
from scalejax.hardware import Chip, GroupedMatmulRates, RateType, load_grouped_matmul_rates
from scalejax.simulator.operations.matmul import OPERAND_BYTES, ProductTime
from scalejax.simulator.program import GroupedPass

UNKNOWN_CHIP = GroupedMatmulRates(
    name="unknown",
    source="rounded from the rates of the catalogue: those of chips from H100 to GB300",
    tile_rows=128,
    matmul_fraction={},
    memory_fraction=1.0,
    group_seconds=0.1e-6,
    sources={},
)
"""Tile and time per group on chips that were not measured; their fractions are their own."""


_TPU_TILE_ROWS, _TPU_TILE_SIDE = 512, 1024
"""Rows of a tile, and elements of both of its widths, in the kernel for TPUs (MaxText/configs/
base.yml: tile_batch_seq, tile_embed_dim, tile_mlp_dim; jax.experimental.pallas.ops.tpu.megablox).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedProduct:
    """Work of one grouped product on one device."""

    groups: int
    """Groups of rows: the experts on the device."""
    rows: float
    """Rows of all groups: tokens times experts per token that land on the device."""
    outer: int
    """Width of the result of the forward product."""
    inner: int
    """Width of the rows of the forward product."""
    dtype: str
    """Type of the operands, as `Operation.dtype`."""
    grouped_pass: GroupedPass = "forward"
    """Pass that the product belongs to."""

    def __post_init__(self) -> None:
        for name in ("groups", "outer", "inner"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("rows", self.rows, 0)

    @property
    def flop(self) -> float:
        """FLOP of the actual rows, the same in every pass."""
        return 2 * self.rows * self.outer * self.inner

    def compulsory_bytes(self, kind: RateType) -> float:
        """Bytes of the operands and the result, each moved once."""
        operand, result = OPERAND_BYTES[kind]
        matrices = self.groups * self.outer * self.inner
        if self.grouped_pass == "weight_gradient":
            return self.rows * (self.inner + self.outer) * operand + matrices * result
        narrow, wide = (self.inner, self.outer)
        if self.grouped_pass == "input_gradient":
            narrow, wide = wide, narrow
        return (self.rows * narrow + matrices) * operand + self.rows * wide * result


def grouped_product_time(
    product: GroupedProduct, chip: Chip, *, moved_bytes: float = 0.0
) -> ProductTime:
    """Time of `product` on `chip`, excluding launch.

    busy = ramp + groups x group time
         + max(2 tiles tile_rows outer inner / (peak fraction), bytes / attainable bandwidth),
    with tiles = groups ceil(rows / groups / tile_rows), and on a TPU both widths rounded up to the
    side of the matrix units. Time grows with rows, and with groups at equal rows and widths. The
    fraction is at most that of plain products on the chip.

    Args:
        product: the work.
        chip: where it runs.
        moved_bytes: bytes that the operation moves, if they are known to be more than its operands
            and result.
    Source: tiles of 128 rows padded for each expert, Gale et al. 2022, "MegaBlocks", arXiv
        2211.15841, section 5.1.
    """
    attainable, kind = chip.attainable, chip.rate_type(product.dtype)
    rates = rates_of(chip)
    peak, bandwidth = chip.peak_flop_per_second[kind], chip.memory_bytes_per_second
    fraction = rates.matmul_fraction.get("bf16" if kind == "f16" else kind)
    # Measured by others than plain products, and higher on Blackwell; but groups save no time.
    fraction = min(fraction or 1.0, attainable.matmul_fraction) * attainable.sustained_fraction
    tiles = product.groups * math.ceil(product.rows / product.groups / rates.tile_rows)
    flop = 2 * tiles * rates.tile_rows * product.outer * product.inner
    moved = max(moved_bytes, product.compulsory_bytes(kind))
    if chip.tpu is not None:
        fraction *= chip.tpu.filled(product.outer) * chip.tpu.filled(product.inner)
        tiles = _tiles_on_tpu(product)
        moved = max(moved, _tile_bytes_on_tpu(product, tiles, kind))
        flop = 2 * tiles * _TPU_TILE_ROWS * product.outer * product.inner
    compute = flop / (peak * fraction) / attainable.grouped_scale
    memory = moved / (bandwidth * rates.memory_fraction) / attainable.grouped_scale
    aside = attainable.matmul_ramp_seconds + product.groups * rates.group_seconds
    return ProductTime(
        compute_seconds=compute,
        memory_seconds=memory,
        busy_seconds=aside + max(compute, memory),
    )


def _tiles_on_tpu(product: GroupedProduct) -> int:
    """Tiles of rows that the kernel for TPUs multiplies: groups follow each other in one array, and
    a tile in which one group ends and the next begins is multiplied for both (megablox,
    make_group_metadata)."""
    tiles = math.ceil(product.rows / _TPU_TILE_ROWS)
    return tiles + min(product.groups, math.ceil(product.rows)) - 1 if product.rows else 0


def _tile_bytes_on_tpu(product: GroupedProduct, tiles: int, kind: RateType) -> float:
    """Bytes of the tiles of both operands; each step of the kernel loads one tile of each."""
    operand, _ = OPERAND_BYTES[kind]
    outer, inner = min(_TPU_TILE_SIDE, product.outer), min(_TPU_TILE_SIDE, product.inner)
    steps = tiles * math.ceil(product.outer / outer) * math.ceil(product.inner / inner)
    rows = _TPU_TILE_ROWS
    loaded = {
        "forward": rows * inner + inner * outer,
        "input_gradient": rows * outer + inner * outer,
        "weight_gradient": rows * inner + rows * outer,
    }[product.grouped_pass]
    return steps * loaded * operand


def rates_of(chip: Chip) -> GroupedMatmulRates:
    """The fitted rates of the chip, or those of its plain products if none were fitted."""
    attainable = chip.attainable
    if attainable.grouped_matmul_rates is not None:
        return load_grouped_matmul_rates(attainable.grouped_matmul_rates)
    return GroupedMatmulRates(
        name=UNKNOWN_CHIP.name,
        source=UNKNOWN_CHIP.source,
        tile_rows=UNKNOWN_CHIP.tile_rows,
        matmul_fraction=UNKNOWN_CHIP.matmul_fraction,
        memory_fraction=attainable.memory_fraction,
        group_seconds=UNKNOWN_CHIP.group_seconds,
        sources={},
    )
