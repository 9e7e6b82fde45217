"""The users of a shared service: their policies, leases and seats, on disk and in memory. No Ray, and no clock of its own."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.config import ServingSection
from rl_vlm.files import write_atomic
from rl_vlm.serving.policy_key import lock_of, opens
from rl_vlm.serving.version_line import VersionLine

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One user. `keeper`: it has no policy and only keeps the service up. `revision`: of its last change."""

    policy: str
    lock: str
    seat: int
    keeper: bool
    deadline: float  # of its lease, in seconds of the caller's clock
    line: VersionLine
    revision: int = 0


class Members:
    """The users, kept in a folder so that a restarted registry knows them. Tokens are not kept, only their hashes.

    A name belongs to its first token for as long as the service lives, so that nothing that is still on its way to or from a policy that
    is gone can meet another run's policy of that name.
    """

    def __init__(self, folder: Path, lease_s: float, now: float, make_line: Callable[[Path, str], VersionLine]) -> None:
        self._folder, self._lease_s, self._make_line = folder, lease_s, make_line
        self._file = folder / "members.json"
        self._members: dict[str, Member] = {}
        self._locks: dict[str, str] = {}  # of every name that was ever taken
        # A registry that was killed while it took somebody in leaves a folder that nobody owns.
        self._next_folder = max((int(one.name) + 1 for one in folder.glob("*") if one.name.isdecimal()), default=0)
        self.revision = 0
        self.empty_since = now
        if self._file.is_file():
            saved = json.loads(self._file.read_text())
            self._locks = saved["locks"]
            for entry in saved["members"]:
                self._add(entry, now)

    def _add(self, entry: dict[str, Any], now: float) -> Member:
        self._next_folder = max(self._next_folder, int(entry["folder"]) + 1)
        line = self._make_line(self._folder / entry["folder"], entry["policy"])
        deadline = now + self._lease_s
        member = Member(entry["policy"], entry["lock"], entry["seat"], entry["keeper"], deadline, line)
        self._members[member.policy] = member
        self.touch(member)
        return member

    def _save(self) -> None:
        """Write who is a member. With a full disk only a restarted registry does not know them, and they join again."""
        entries = [
            {"policy": m.policy, "lock": m.lock, "seat": m.seat, "keeper": m.keeper, "folder": m.line.folder.name}
            for m in self._members.values()
        ]
        try:
            write_atomic(self._file, json.dumps({"members": entries, "locks": self._locks}))
        except OSError as error:
            logger.warning("the users of the shared service are not on disk: %s", error)

    def touch(self, member: Member) -> None:
        """Something about a member has changed."""
        self.revision += 1
        member.revision = self.revision

    def join(self, policy: str, token: str, keeper: bool, now: float) -> Member | None:
        """The member of this name, new or again with the same token; None where another one has it or had it."""
        if not opens(token, self._locks.setdefault(policy, lock_of(token))):
            return None
        known = self._members.get(policy)
        if known is not None:
            known.deadline = now + self._lease_s
            return known
        taken = {member.seat for member in self._members.values()}
        seat = next(number for number in range(len(taken) + 1) if number not in taken)
        folder = self._folder / str(self._next_folder)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir()
        except OSError as error:
            logger.warning("%s cannot be made, so versions of %s are not on disk: %s", folder, policy, error)
        member = self._add(
            {"policy": policy, "lock": lock_of(token), "seat": -1 if keeper else seat, "keeper": keeper, "folder": folder.name},
            now,
        )  # fmt: skip
        self._save()
        return member

    def opened(self, policy: str, token: str) -> Member | None:
        """The member whose policy this token opens."""
        member = self._members.get(policy)
        return member if member is not None and opens(token, member.lock) else None

    def renew(self, policy: str, token: str, now: float) -> bool:
        """Prolong a lease; False for somebody who is not a member (any more)."""
        member = self.opened(policy, token)
        if member is not None:
            member.deadline = now + self._lease_s
        return member is not None

    def remove(self, member: Member, now: float) -> None:
        """Forget a member and its versions."""
        del self._members[member.policy]
        self.revision += 1
        if self._members:
            self._save()
            shutil.rmtree(member.line.folder, ignore_errors=True)
        else:
            # Now, because the cluster of the last run may end with it, before the registry does.
            self.empty_since = now
            shutil.rmtree(self._folder, ignore_errors=True)

    def excuse(self, seconds: float) -> None:
        """Prolong all leases by a time in which nobody could be heard."""
        for member in self._members.values():
            member.deadline += seconds

    def expired(self, now: float) -> list[Member]:
        """Members that have not been heard of for the length of a lease."""
        return [member for member in self._members.values() if member.deadline < now]

    @property
    def names(self) -> frozenset[str]:
        """Every name that was ever taken."""
        return frozenset(self._locks)

    def __iter__(self) -> Any:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    @property
    def policies(self) -> list[Member]:
        """Members with a policy."""
        return [member for member in self._members.values() if not member.keeper]


def wanted_replicas(serving: ServingSection, policies: int) -> int:
    """How many replicas this many policies get."""
    sharing = serving.sharing
    if sharing.policies_per_replica is None:
        return serving.num_replicas
    most = max(sharing.replica_limit, serving.num_replicas)
    return min(max(math.ceil(policies / sharing.policies_per_replica), serving.num_replicas), most)
