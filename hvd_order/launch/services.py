"""What runs beside the workers of a job, from before their start until after their end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from hvd_order.base.wings import Registry
from hvd_order.launch.request import LaunchRequest

__all__: list[str] = []

Variables = Mapping[str, str]
"""Environment variables for the workers."""

# By name; each runs until the context is left.
SERVICES: Registry[Callable[[LaunchRequest], AbstractContextManager[Variables]]] = Registry(
    "job service"
)


def services_of(request: LaunchRequest) -> AbstractContextManager[Variables]:
    """Returns the services that a job asks for; they begin when the context is entered."""
    if request.servers == 0:
        return contextlib.nullcontext({})
    return SERVICES.find("servers")(request)
