"""Everything an operator can set, read once when the process starts."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of one service process: arguments first, then LONGTAIL_… in the environment, then these defaults."""

    model_config = SettingsConfigDict(env_prefix="LONGTAIL_", frozen=True)

    releases: Path
    """Directory that `longtail-index` publishes to; its CURRENT names the release to serve."""
    host: str = "127.0.0.1"
    """Address to bind. There is no authentication: bind anything but loopback behind a gateway only."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to bind; 0 lets the system choose one."""
    poll_seconds: float = Field(default=1.0, gt=0)
    """How often CURRENT is read; a published release is loaded at most this much later."""
    search_threads: int = Field(default=2, ge=1)
    """Requests that are encoded and searched at once, one core each; more than there are cores only adds waiting."""
    drain_seconds: float = Field(default=1.0, ge=0)
    """After SIGTERM, how long requests are still taken while /readyz says 503, for a load balancer to look away."""
    shutdown_seconds: int = Field(default=30, ge=1)
    """After that, how long requests under way may take to finish before they are cut off."""
    max_body_bytes: int = Field(default=1 << 20, ge=1)
    """Longest request body that is read; a longer one gets 413 and is never held in memory."""
    max_queries: int = Field(default=256, ge=1)
    """Most queries (or label ids, for /v1/similar) in one request."""
    max_k: int = Field(default=1000, ge=1)
    """Most labels that one query may ask for."""
    max_ids: int = Field(default=10_000, ge=1)
    """Most ids in one `exclude` or `allow`."""
