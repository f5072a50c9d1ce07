"""A transformer given by its dimensions alone, which can be planned but not trained."""

from __future__ import annotations

from pydantic import Field, model_validator

from paceline.job.spec import Spec


class Dimensions(Spec):
    """Dimensions of a language model in place of its code.

    For example `{layers: 80, hidden: 8192, ffn: 28672, heads: 64, kv_heads: 8, seq: 4096, vocab: 128256}`.

    `ffn` is 4 × hidden where not given, `kv_heads` as many as heads. `gated`: three matrices in each feed-forward part
    (SwiGLU) instead of two. `tied`: the head is the embedding. `positions`: a table of learned positions. `dropout`:
    whether it has any (gated models have none). With `experts`, each layer has as many feed-forward parts of `ffn`, and
    every token goes through `top_k` of them.
    """

    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    ffn: int | None = Field(None, ge=1)
    heads: int = Field(ge=1)
    kv_heads: int | None = Field(None, ge=1)
    seq: int = Field(ge=1)
    vocab: int = Field(ge=1)
    gated: bool = False
    tied: bool = True
    positions: bool = True
    causal: bool = True
    dropout: bool = True
    experts: int = Field(0, ge=0)
    top_k: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _divide(self) -> Dimensions:
        if self.hidden % self.heads:
            fitting = self.heads * max(1, round(self.hidden / self.heads))
            raise ValueError(f"hidden: {self.hidden} does not divide into {self.heads} heads; {fitting} would")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads: {self.heads} heads do not divide into {self.key_value_heads} kv_heads")
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"top_k: {self.top_k} of {self.experts} experts; it is at most as many as there are")
        return self

    @property
    def feed_forward(self) -> int:
        """The width of a feed-forward part."""
        return self.ffn or 4 * self.hidden

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads
