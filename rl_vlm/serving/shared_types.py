"""What runs, registry and replicas of a shared service tell each other, and where they find each other. No Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_vlm.serving.version_line import Published

SHARED_NAMESPACE = "rl_vlm"  # one for all jobs, so that they find each other's services

Revision = tuple[str, int]  # of a registry's process, and in it


@dataclass(frozen=True, slots=True)
class Welcome:
    """A user's place: the number of its seat."""

    seat: int


@dataclass(frozen=True, slots=True)
class Entry:
    """What a replica knows of a policy: the lock of its token, and its newest version."""

    lock: str
    newest: Published | None


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since an earlier revision, and who is gone.

    `gone`: None for all that are not `present`. A registry that came back without its folder knows only those that have left since:
    the others have not had time to join again.
    """

    revision: Revision
    entries: Mapping[str, Entry]
    present: frozenset[str]
    gone: frozenset[str] | None = None


def shared_id(name: str) -> str:
    """The run id under which a shared service's application and registry are known."""
    return f"shared-{name}"
