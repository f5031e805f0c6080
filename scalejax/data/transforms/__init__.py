"""Transforms of examples: image decoding and augmentation."""
