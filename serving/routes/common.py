"""What the routes share."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from serving.schemas import ErrorAnswer
from serving.service import Service


def service_of(request: Request) -> Service:
    """The application's state."""
    service: Service = request.app.state.service
    return service


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the documentation: the one shape of an error, under each status."""
    return {status: {"model": ErrorAnswer} for status in statuses}
