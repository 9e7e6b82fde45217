"""`resources`: the Ray cluster."""

from __future__ import annotations

from pydantic import Field

from rl_vlm.config.section import Section


class ResourcesSection(Section):
    """The Ray cluster: a private one unless RAY_ADDRESS (or a Ray job) names another."""

    num_cpus: int | None = Field(
        None, ge=1, description="Logical CPUs of the private cluster; null: what the run needs."
    )
    object_store_mib: int = Field(256, ge=80)
    dashboard: bool = False
