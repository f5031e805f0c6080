"""A run whose batch grows, small enough to count its updates by hand."""

from typing import Any

TABLES: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [16]},
    "data": {
        "name": "synthetic_images",
        "image_size": 8,
        "channels": 1,
        "classes": 4,
        "train_examples": 40,
        "test_examples": 12,
    },
    "batch": {"global_batch": 8, "ramp_epochs": [1, 3]},
    "optimizer": {"name": "sgd", "momentum": 0.9},
    "schedule": {"base_learning_rate": 0.1},
    "train": {"epochs": 5},
}
"""40 examples: 5 updates of 8 an epoch, from epoch 1 on 2 of 16, from epoch 3 on 1 of 32."""
