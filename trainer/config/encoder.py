"""What reads a history as a sequence: `encoder` of a feature."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from longtail.trainer.config.base import Section


class EncoderConfig(Section):
    """Layers over a history's entries in their order, each of which sees those before it; a bare string is a name.

    What they make of the last entry stands for the history; of an empty one, a learned vector.
    """

    name: Literal["sasrec", "hstu"]
    """`sasrec`: blocks of causal self-attention and a feed-forward layer (Kang and McAuley 2018), normalised before
    each. `hstu`: pointwise attention with a bias by distance, gated (Zhai et al. 2024)."""
    layers: int = Field(default=2, ge=1, le=32)
    heads: int = Field(default=2, ge=1)
    """Attention heads; `dim` of the feature is divided among them."""
    hidden: int | None = Field(default=None, ge=1)
    """Width of the feed-forward layers of `sasrec`; 4·`dim` unless given."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Share of the coordinates of entries, and of what each layer adds to them, set to 0 in training."""
    time_buckets: int | None = Field(default=None, ge=2, le=512)
    """Ranges of elapsed time, equally wide in its logarithm up to 68 years in seconds, that the layers tell apart; by
    default they know the order alone. `hstu`: a bias of the time from an entry to what follows the one that attends,
    the request after the last. `sasrec`: an embedding of the time from an entry to what follows it. Needs
    `data.timestamp`; requests may then give times."""
    without_times: float = Field(default=0.05, ge=0, lt=1)
    """Share of histories that a step reads without times, with `time_buckets`, so that requests may give ids alone; 0
    where all give times."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _of_its_name(self) -> EncoderConfig:
        if self.hidden is not None and self.name != "sasrec":
            raise ValueError(f"encoder: expected hidden with 'sasrec' only, received {self.name!r}")
        if self.time_buckets is None and "without_times" in self.model_fields_set:
            raise ValueError(
                f"encoder: expected without_times beside time_buckets only, received {self.without_times:g}"
            )
        return self
