"""When to stop before the last epoch, and which epoch was best: the rules of Keras 3, exactly.

Knows figures alone: no weights, no files. What it holds follows from the evaluations so far, so
a resumed run gives it those again and need store nothing.

Source: keras/src/callbacks/early_stopping.py, Keras 3.15. Its `patience` counts epochs without
improvement and stops in the epoch that makes them `patience`, so 0 and 1 mean the same, and
never in the first epoch; flax's `EarlyStopping` stops one evaluation later.
"""

import numpy as np

from scalejax.training_config import EarlyStoppingConfig


class EarlyStopping:
    """Follows one metric over the epochs of a run."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self._config = config
        self._falls = config.monitor == "test_loss"
        self._best_value: float | None = None
        self._wait = 0
        self.best_epoch: int | None = None
        """Epoch whose weights are the best, counted from 0; None before any was watched."""
        self.has_stopped = False
        """Whether the epoch last told is the last one."""

    def update(self, epoch: int, value: float) -> None:
        """Take in the metric after an epoch.

        Args:
            epoch: counted from 0.
            value: test loss or test accuracy, as `monitor` says; may be NaN.
        """
        config = self._config
        if epoch < config.start_from_epoch:
            return
        self._wait += 1
        if self._is_better(value, self._best_value):
            self._best_value, self.best_epoch = value, epoch
            if config.baseline is None or self._is_better(value, config.baseline):
                self._wait = 0
            return
        self.has_stopped = self._wait >= config.patience and epoch > 0

    def _is_better(self, value: float, reference: float | None) -> bool:
        """Whether `value` beats `reference` by more than `min_delta`; anything beats None.

        Compared in float32, as Keras compares: 0.9 against 1.0 is no change of more than 0.1.
        """
        if reference is None:
            return True
        min_delta = abs(self._config.min_delta)
        if self._falls:
            return bool(np.float32(value + min_delta) < np.float32(reference))
        return bool(np.float32(value - min_delta) > np.float32(reference))
