"""Reads metrics: from the nodes of a Ray cluster, which its dashboard names, or from a Prometheus."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import getproxies

from rl_vlm.envs.adapters.address import is_loopback
from rl_vlm.types import RLVLMError, UserInputError

# What `rl-vlm top` looks at; a node's agent has thousands of other series.
WANTED = ("ray_rl_vlm_", "ray_node_")
DEFAULT_DASHBOARD = "http://127.0.0.1:8265"
_TIMEOUT_S = 5.0
_READERS = 16  # nodes that are read at once


class Sample(NamedTuple):
    """One value of one series."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricsUnavailableError(UserInputError):
    """There are no metrics where the user said, or the user may not read them."""


def default_dashboard() -> str:
    """The dashboard that Ray's environment variables name, else the one of this machine."""
    named = [os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")]
    return next((url for url in named if url.startswith("http")), DEFAULT_DASHBOARD)


def parse(text: str) -> list[Sample]:
    """The wanted samples of a page in Prometheus' text format; nan is left out."""
    from prometheus_client.parser import text_string_to_metric_families

    lines = "".join(line + "\n" for line in text.splitlines() if line.startswith(WANTED))
    return [
        Sample(one.name, one.labels, one.value)
        for family in text_string_to_metric_families(lines)
        for one in family.samples
        if not math.isnan(one.value)
    ]


def read_cluster(dashboard: str) -> tuple[list[Sample], list[str]]:
    """The samples of all nodes, and the endpoints that did not answer. Raises MetricsUnavailableError, also when none answered."""
    groups = _get(f"{dashboard.rstrip('/')}/api/prometheus/sd", dashboard, _token()).json()
    targets = [target for group in groups for target in group["targets"]]
    with ThreadPoolExecutor(_READERS) as threads:
        pages = list(threads.map(_page, targets))
    missing = [target for target, page in zip(targets, pages, strict=True) if page is None]
    if targets and len(missing) == len(targets):
        raise MetricsUnavailableError(
            f"The dashboard {dashboard} names {len(targets)} metrics endpoints ({targets[0]}, ...) and none answers here: run "
            "`rl-vlm top` on a machine of the cluster, or read a Prometheus with --prometheus."
        )
    return [sample for page in pages if page is not None for sample in parse(page)], missing


def read_prometheus(url: str) -> list[Sample]:
    """The present samples that a Prometheus has. Raises MetricsUnavailableError."""
    query = '{__name__=~"' + "|".join(f"{prefix}.+" for prefix in WANTED) + '"}'
    found = _get(f"{url.rstrip('/')}/api/v1/query", url, params={"query": query}).json()
    samples = []
    for series in found["data"]["result"]:
        labels = dict(series["metric"])
        value = float(series["value"][1])
        if not math.isnan(value):
            samples.append(Sample(labels.pop("__name__"), labels, value))
    return samples


def _page(target: str) -> str | None:
    import httpx

    # These ports know no token, so none is sent to them. Most proxies do not reach the cluster's own network, but one may be the way to it.
    for by_proxy in (False, True) if getproxies() else (False,):
        with contextlib.suppress(httpx.HTTPError):
            page = httpx.get(f"http://{target}/metrics", timeout=_TIMEOUT_S, trust_env=by_proxy)
            return page.raise_for_status().text
    return None


def _get(url: str, named: str, headers: Mapping[str, str] | None = None, **query: Any) -> Any:
    import httpx

    try:
        answer = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, trust_env=not is_loopback(url), **query)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise MetricsUnavailableError(
            f"Nothing answers at {named} ({error}): give the head's dashboard with --address, or a Prometheus with --prometheus. A "
            "private cluster has metrics with resources.dashboard=true and logging.ray_metrics=true."
        ) from error
    if answer.status_code in (401, 403):
        raise MetricsUnavailableError(
            f"{named} asks for the cluster's token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that holds it."
        )
    if answer.status_code != 200 or "json" not in answer.headers.get("content-type", ""):
        raise MetricsUnavailableError(
            f"{named} answers {answer.status_code} and no metrics: is this the right address?"
        )
    return answer


def token_file() -> Path:
    """Where Ray looks for the token if no variable holds it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def _token() -> dict[str, str]:
    """The header of Ray's token authentication: the token of the environment, of a file, or of Ray's own file; empty without one."""
    token, path = os.environ.get("RAY_AUTH_TOKEN", "").strip(), token_file()
    if not token and path.is_file():
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise RLVLMError(f"Cannot read the token in {path}: {error.strerror}.") from error
    return {"Authorization": f"Bearer {token}"} if token else {}
