"""Whether the actors of the RayJob and of the RayService find their GPUs on a type of worker that there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rl_vlm.cluster.values import PREEMPTIBLE, ClusterValues, WorkerSection
from rl_vlm.config.loading import read_yaml
from rl_vlm.types import UserInputError

# The key of a run that says how many GPUs an actor takes, and the type of worker on which `placement` puts it.
_ASKED = {("serving", "gpus_per_replica"): "gpu_serving", ("learner", "gpus_per_learner"): "gpu_learner"}


def check_gpus(values: ClusterValues, workers: Mapping[str, WorkerSection]) -> None:
    """Raise UserInputError where `job.overrides` or `service.overrides` ask for GPUs that none of the `workers` has.

    Kubernetes takes such manifests, and the run waits for nodes that never come. What the configuration in the image asks for is
    not known here.
    """
    _check("job", values.job.overrides, workers)
    serving = {name: worker for name, worker in workers.items() if name.removesuffix(PREEMPTIBLE) == "gpu_serving"}
    _check("service", values.service.overrides, serving)


def _check(name: str, overrides: Iterable[str], workers: Mapping[str, WorkerSection]) -> None:
    asked = read_yaml(None, overrides)
    for (section, key), kind in _ASKED.items():
        part = asked.get(section)
        gpus = part.get(key, 0) if isinstance(part, dict) else 0  # the run itself tells of another type
        own = [worker for type_, worker in workers.items() if type_.removesuffix(PREEMPTIBLE) == kind]
        most = max((worker.gpus for worker in own or workers.values()), default=0)
        if isinstance(gpus, (int, float)) and gpus > most:
            raise UserInputError(
                f"{name}.overrides asks for {section}.{key}={gpus:g}, and no type of worker on which that could run has as many GPUs: "
                f"raise workers.{kind}.{'gpus' if own else 'max'}, or change {name}.overrides."
            )
