"""Keras versions of models from paceline's zoo, with initial weights from torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]
Layers = tf.keras.layers


def mlp(weights: Weights, args: dict[str, Any]) -> Any:
    """Build the model `mlp`, which maps images of shape (n, 28, 28, 1) to logits."""
    model = tf.keras.Sequential([Layers.Flatten(), _dense(weights, "1", "relu"), _dense(weights, "3")])
    return _built(model, (1, 28, 28, 1), {"1": 1, "3": 2}, weights)


def cifar_cnn(weights: Weights, args: dict[str, Any]) -> Any:
    """Build the model `cifar_cnn`, which maps images of shape (n, 32, 32, 3) to logits.

    The input features of the first dense layer are reordered, since Keras flattens images in channels-last order.
    """
    model = tf.keras.Sequential(
        [
            Layers.Conv2D(16, 3, padding="same", activation="relu"),
            Layers.MaxPool2D(),
            Layers.Conv2D(32, 3, padding="same", activation="relu"),
            Layers.MaxPool2D(),
            Layers.Flatten(),
            _dense(weights, "7", "relu"),
            _dense(weights, "9"),
        ]
    )
    rows = weights["7.weight"].reshape(-1, 32, 8, 8).transpose(0, 2, 3, 1).reshape(len(weights["7.weight"]), -1)
    return _built(model, (1, 32, 32, 3), {"0": 0, "3": 2, "7": 5, "9": 6}, {**weights, "7.weight": rows})


class GPT(tf.keras.Model):
    """Model `gpt` without dropout, which maps tokens of shape (n, t) to logits of shape (n, t, vocab).

    The output layer and the token embedding share one weight matrix.
    """

    def __init__(self, weights: Weights, args: dict[str, Any]) -> None:
        super().__init__()
        self.heads = int(args.get("heads", 4))
        self.token_weights = self.add_weight(shape=weights["tokens.weight"].shape, name="tokens")
        self.position_weights = self.add_weight(shape=weights["positions.weight"].shape, name="positions")
        self.blocks = [_Block(weights, f"blocks.{number}", self.heads) for number in range(int(args.get("layers", 4)))]
        self.norm = Layers.LayerNormalization(epsilon=1e-5)

    def call(self, tokens: Any) -> Any:
        """Return the logits of the next token at each position."""
        x = tf.gather(self.token_weights, tokens) + self.position_weights[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return tf.einsum("nth,vh->ntv", self.norm(x), self.token_weights)

    def carry(self, weights: Weights) -> None:
        """Load torch's weights into all layers."""
        self.token_weights.assign(weights["tokens.weight"])
        self.position_weights.assign(weights["positions.weight"])
        _set(self.norm, weights, "norm")
        for number, block in enumerate(self.blocks):
            block.carry(weights, f"blocks.{number}")


class _Block(Layers.Layer):  # type: ignore[name-defined]
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, weights: Weights, name: str, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = Layers.LayerNormalization(epsilon=1e-5)
        self.query_key_value = _dense(weights, f"{name}.attention.query_key_value")
        self.out = _dense(weights, f"{name}.attention.out")
        self.mlp_norm = Layers.LayerNormalization(epsilon=1e-5)
        self.up = _dense(weights, f"{name}.mlp.0", lambda x: tf.nn.gelu(x, approximate=False))
        self.down = _dense(weights, f"{name}.mlp.2")

    def call(self, x: Any) -> Any:
        """Transform activations of shape (n, t, hidden) into activations of the same shape."""
        x = x + self._attention(self.attention_norm(x))
        return x + self.down(self.up(self.mlp_norm(x)))

    def _attention(self, x: Any) -> Any:
        length, hidden = x.shape[1], x.shape[2]
        parts = tf.reshape(self.query_key_value(x), (-1, length, 3, self.heads, hidden // self.heads))
        query, key, value = tf.unstack(tf.transpose(parts, (2, 0, 3, 1, 4)))
        scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(hidden // self.heads)
        seen = tf.linalg.band_part(tf.ones((length, length)), -1, 0)
        mixed = tf.matmul(tf.nn.softmax(scores + (1.0 - seen) * -1e9), value)
        return self.out(tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (-1, length, hidden)))

    def carry(self, weights: Weights, name: str) -> None:
        """Load torch's weights of the block with a given name."""
        _set(self.attention_norm, weights, f"{name}.attention_norm")
        _set(self.query_key_value, weights, f"{name}.attention.query_key_value")
        _set(self.out, weights, f"{name}.attention.out")
        _set(self.mlp_norm, weights, f"{name}.mlp_norm")
        _set(self.up, weights, f"{name}.mlp.0")
        _set(self.down, weights, f"{name}.mlp.2")


def gpt(weights: Weights, args: dict[str, Any]) -> Any:
    """Build the model `gpt` and load torch's weights."""
    model = GPT(weights, args)
    model(np.zeros((1, int(args.get("context", 128))), np.int64))
    model.carry(weights)
    return model


def _dense(weights: Weights, name: str, activation: Any = None) -> Any:
    return Layers.Dense(len(weights[f"{name}.bias"]), activation=activation)


def _built(model: Any, shape: tuple[int, ...], places: dict[str, int], weights: Weights) -> Any:
    """Build the model for inputs of a shape, and copy torch's weights into its layers."""
    model.build(shape)
    for name, place in places.items():
        _set(model.layers[place], weights, name)
    return model


def _set(layer: Any, weights: Weights, name: str) -> None:
    """Set a layer's weight and bias from torch.

    A weight of shape (out, in) is transposed to (in, out), and (out, in, h, w) to (h, w, in, out).
    """
    weight = weights[f"{name}.weight"]
    axes = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}[weight.ndim]
    layer.set_weights([weight.transpose(axes), weights[f"{name}.bias"]])


MODELS: dict[str, Callable[[Weights, dict[str, Any]], Any]] = {"mlp": mlp, "cifar_cnn": cifar_cnn, "gpt": gpt}
