"""What a run asks of Ray's cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_vlm.config.section import Count, Section

_SHARE = 0.001  # of a node's one unit: a thousand actors fit, and CPUs and GPUs alone say how many there are
_ResourceName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,62}$")]


def claim(resource: str | None) -> dict[str, float]:
    """The custom resources that an actor asks for to be placed on nodes that offer `resource`."""
    return {} if resource is None else {resource: _SHARE}


class ResourcesSection(Section):
    """The Ray cluster: a private one unless RAY_ADDRESS (or a Ray job) names another.

    `*_on` name kinds of nodes by the custom Ray resource that they offer.
    """

    num_cpus: Count | None = None  # Logical CPUs of the private cluster; null: what the run needs.
    # Of the private cluster; null: 256, or more where versions of the adapter need it.
    object_store_mib: int | None = Field(None, ge=80)
    dashboard: bool = False  # Start the Ray dashboard with a private cluster.
    # pairs: as many learners as replicas, one of each on a GPU, in turns; split: each where it finds room. null: split.
    placement: Literal["split", "pairs"] | None = None
    replicas_on: _ResourceName | None = None  # Where replicas of the model run; null: anywhere.
    learners_on: _ResourceName | None = None  # Where learner actors run; one in the driver stays there.
    env_runners_on: _ResourceName | None = None  # Where env runners run.

    @property
    def node_kinds(self) -> set[str]:
        return {name for name in (self.replicas_on, self.learners_on, self.env_runners_on) if name is not None}
