"""A real Prometheus of the test's own, with the project's configuration and rules at a quicker pace."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from head import RayHead
from jobs import wait_until
from ports import free_ports
from runs import ROOT

FOLDER = ROOT / "cluster" / "monitoring"
WINDOW = "60s"  # in place of a quarter of an hour


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed: apt-get install prometheus"
    return found


def quicker(rules: str) -> str:
    """The rules with windows and patience of seconds; the disk of this machine counts as nearly full."""
    rules = re.sub(r"for: \d+m", "for: 1s", rules).replace("15m", WINDOW).replace("1800", "8").replace("> 92", "> 0")
    assert "15m" not in rules and "1800" not in rules
    return rules


class Prometheus:
    """Scrapes the nodes of a head, which it asks the dashboard for; ends with this context."""

    def __init__(self, head: RayHead, folder: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.started = time.time()
        # The line about the token is part of the file, as a comment.
        shipped = (FOLDER / "prometheus.yml").read_text()
        asked = shipped.replace("# authorization: {type: Bearer, credentials_file: /root", "authorization: {type: Bearer, credentials_file: /root")  # fmt: skip
        assert asked != shipped
        config = yaml.safe_load(asked)
        config["global"] = {"scrape_interval": "3s", "evaluation_interval": "1s"}
        (scraped,) = config["scrape_configs"]
        (found,) = scraped["http_sd_configs"]
        found |= {"url": f"{head.dashboard}/api/prometheus/sd", "refresh_interval": "1s"}
        found["authorization"]["credentials_file"] = str(head.folder / "token")
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "alerts.yml").write_text(quicker((FOLDER / "alerts.yml").read_text()))
        self.log = folder / "prometheus.log"
        command = [
            tool("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: self.query("up == 1"), "scraped node", 60)
        except BaseException:
            print(self.log.read_text()[-2000:])
            self.__exit__()
            raise

    def _get(self, what: str, **parameters: Any) -> Any:
        assert self.process.poll() is None, self.log.read_text()
        answer = httpx.get(f"{self.url}/api/v1/{what}", params=parameters, timeout=10)
        if answer.status_code >= 500:  # it is starting
            answer.raise_for_status()
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        return self._get("query", query=expr)["result"]  # type: ignore[no-any-return]

    def history(self, expr: str) -> list[float]:
        """All values of all series since the start."""
        found = self._get("query_range", query=expr, start=self.started, end=time.time(), step="1s")["result"]
        return [float(value) for series in found for _, value in series["values"]]

    def fired(self) -> set[tuple[str, str]]:
        """Alert and run of all that have fired since the start."""
        found = self._get(
            "query_range", query='ALERTS{alertstate="firing"}', start=self.started, end=time.time(), step="1s"
        )["result"]
        return {(series["metric"]["alertname"], series["metric"].get("run", "")) for series in found}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)
