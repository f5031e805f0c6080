"""The gradient noise scale: the batch size beyond which more samples bring little.

    noise scale = S / |G|^2,

S the variance of the gradient of one sample, summed over parameters, |G| the norm of the true
gradient. Both follow from the norms of gradients at two batch sizes, which an update over several
devices or microbatches computes anyway: no extra backward pass is needed.

Arithmetic on numbers or arrays; knows no networks and no meshes.

Source: McCandlish et al. 2018, arXiv 1812.06162, section 2.2 and appendix A.1.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple


class NoiseAverages(NamedTuple):
    """Moving averages of the two estimates, initially zero.

    Both are too small by the same factor, 1 - decay^updates, which cancels in their ratio. Each is
    averaged separately: the ratio of one update's estimates would be biased.
    """

    variance: Any
    """Average of S: squared length of a gradient, times samples."""
    squared_norm: Any
    """Average of |G|^2: squared length of a gradient."""

    def updated(self, decay: float, variance: Any, squared_norm: Any) -> "NoiseAverages":
        """The averages with the estimates of one more update."""
        return NoiseAverages(
            variance=decay * self.variance + (1 - decay) * variance,
            squared_norm=decay * self.squared_norm + (1 - decay) * squared_norm,
        )

    @property
    def noise_scale(self) -> Any:
        """Noise scale in samples; not above 0 if there are too few estimates."""
        return self.variance / self.squared_norm


def estimates(
    small_squared_norm: Any, big_squared_norm: Any, *, small_batch: float, big_batch: float
) -> tuple[Any, Any]:
    """Unbiased estimates of S and of |G|^2 from one update.

    |G|^2 = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small),
    S = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big).

    Args:
        small_squared_norm: mean squared norm of the gradients of the parts.
        big_squared_norm: squared norm of their mean.
        small_batch: samples of one part.
        big_batch: samples of all parts, more than of one.

    Source: McCandlish et al. 2018, arXiv 1812.06162, appendix A.1.
    """
    variance = (small_squared_norm - big_squared_norm) / (1 / small_batch - 1 / big_batch)
    squared_norm = (big_batch * big_squared_norm - small_batch * small_squared_norm) / (
        big_batch - small_batch
    )
    return variance, squared_norm


def averaged(noise_scales: Iterable[float | None], global_batch: float) -> float | None:
    """The mean noise scale of a run over the progress that it made, an estimate of its critical
    batch; None if none was measured.

    An update with B samples makes 1 / (1 + noise scale / B) of the progress of one without noise.
    Over that progress s, steps with B samples are the integral of (1 + noise scale / B) ds, so

        B_crit = E_min / S_min = (integral of noise scale ds) / (integral of ds).

    Args:
        noise_scales: measured at evenly spaced updates until the target was reached; None where
            there were too few gradients for an estimate.
        global_batch: samples per update.

    Source: McCandlish et al. 2018, arXiv 1812.06162, sections 2.2 to 2.4 and appendix D.
    """
    scales = [scale for scale in noise_scales if scale is not None]
    progress = [1 / (1 + scale / global_batch) for scale in scales]
    if not scales:
        return None
    return sum(s * p for s, p in zip(scales, progress, strict=True)) / sum(progress)
