"""The values from which all manifests are rendered: `cluster/values.yaml`, or another file of the same keys."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import yaml
from pydantic import AfterValidator, Field, field_validator, model_validator

from rl_vlm.config import Section

WorkerType = Literal[
    "gpu_serving", "gpu_serving_preemptible", "gpu_learner", "cpu_env_runner", "cpu_env_runner_preemptible"
]
WORKER_TYPES: tuple[WorkerType, ...] = get_args(WorkerType)
PREEMPTIBLE = "_preemptible"
_LONGEST_JOB_NAME = 47  # KubeRay appends to it


def _text(value: str) -> str:
    """Refuse what YAML would read as something else: `no`, `1e3`."""
    if yaml.safe_load(value) != value:
        raise ValueError(f"{value!r} would not be read as text in a manifest: choose another name")
    return value


# Templates write these as they are, into YAML and shell commands: nothing in them means anything there.
_DNSName = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"), AfterValidator(_text)]
_Path = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")]
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9~/._][A-Za-z0-9~/._:@+,=-]*$"), AfterValidator(_text)]
_Labels = dict[str, str]


class ImagesSection(Section):
    """Container images; `rl-vlm cluster render docker` writes their Dockerfiles."""

    cpu: _Word = Field("rl-vlm:cpu", description="Head, env runners.")
    gpu: _Word = Field("rl-vlm:gpu", description="GPU workers.")
    # Ray's nodes refuse each other where their Pythons differ, be it in the last number: both come from one release of Ubuntu.
    cpu_base: _Word = Field(
        "ubuntu:24.04", description="From which the CPU image is built: the release of Ubuntu that gpu_base has."
    )
    gpu_base: _Word = Field(
        "nvidia/cuda:13.0.2-base-ubuntu24.04", description="From which the GPU and Apptainer images are built."
    )
    pull_secret: _DNSName | None = Field(None, description="Kubernetes: the secret of a private image registry.")


class StorageSection(Section):
    """The file system that every node mounts: run folders, models, data."""

    mount: _Path = Field("/mnt/rl_vlm", description="Where it is mounted, on every node and in every container.")
    nfs: _Word = Field(
        "nfs.example.internal:/rl_vlm", description="server:/export, for aws (EFS), gcp (Filestore) and onprem."
    )
    claim: _DNSName = Field("rl-vlm", description="Kubernetes: the PersistentVolumeClaim.")
    storage_class: str = Field("", description="Kubernetes: a class that can be mounted ReadWriteMany; empty: default.")
    size_gib: int = Field(500, ge=1, description="Kubernetes: of the claim.")

    @field_validator("nfs")
    @classmethod
    def _names_an_export(cls, nfs: str) -> str:
        if ":/" not in nfs:
            raise ValueError(f"storage.nfs {nfs} names no export: write server:/export")
        return nfs


class JobSection(Section):
    """What the RayJob trains; the other ways take the same command on the command line."""

    config: str = Field("/opt/rl_vlm/configs/quickstart.yaml", min_length=1, description="In the image, or mounted.")
    run: str = Field("quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$", description="Name of the run folder.")
    overrides: tuple[str, ...] = Field(
        ("learner.num_learners=1", "learner.gpus_per_learner=1", "serving.gpus_per_replica=1"),
        description="Changes to the configuration. A learner on a worker needs learner.num_learners of 1 or more.",
    )
    retries: int = Field(3, ge=0, description="New clusters after a failure; each goes on from the last checkpoint.")
    keep_finished_s: int = Field(600, ge=0, description="How long the finished job's pods stay for their logs.")


class ServiceSection(Section):
    """What the RayService serves."""

    model: str = Field("/mnt/rl_vlm/runs/quickstart", min_length=1, description="A run folder, model folder, hub name.")
    overrides: tuple[str, ...] = Field(
        ("serving.gpus_per_replica=1", "serving.autoscaling={min_replicas: 1, max_replicas: 4}"),
        description="Changes to its configuration.",
    )
    token_secret: _DNSName = Field(
        "rl-vlm-api", description="Kubernetes: the secret whose key `token` clients send as a bearer token."
    )


class HeadSection(Section):
    """The head node, which runs Ray's own services and the driver, and no actors of a run."""

    cpus: int = Field(7, ge=1, description="Kubernetes: of the pod.")
    memory_gib: int = Field(28, ge=4, description="Kubernetes: of the pod.")
    aws: _Word = "m7i.2xlarge"
    gcp: _Word = "n2-standard-8"
    node_selector: _Labels = Field({}, description="Kubernetes.")


class WorkerSection(Section):
    """One type of worker. Its preemptible twin has the same hardware and counts of its own."""

    min: int = Field(0, ge=0, description="Nodes that always run; 0: none while nothing needs them.")
    max: int = Field(0, ge=0, description="0: this type is left out.")
    cpus: int = Field(ge=1, description="Logical CPUs for actors; leave one of the machine's for Ray and the system.")
    memory_gib: int = Field(ge=1, description="Kubernetes: of the pod.")
    shm_gib: int = Field(ge=1, description="/dev/shm, part of the memory: Ray's object store, NCCL.")
    gpus: int = Field(0, ge=0)
    aws: _Word
    gcp: _Word
    node_selector: _Labels = Field({}, description="Kubernetes: labels of the nodes that it may run on.")


def _gpu_serving(most: int) -> WorkerSection:
    return WorkerSection(max=most, cpus=15, memory_gib=56, shm_gib=16, gpus=1, aws="g6.4xlarge", gcp="g2-standard-16")


def _env_runner(most: int) -> WorkerSection:
    return WorkerSection(max=most, cpus=15, memory_gib=28, shm_gib=8, aws="c7i.4xlarge", gcp="n2-standard-16")


class WorkersSection(Section):
    """The types of workers. Their names are the resources that `resources.*_on` of a run name."""

    gpu_serving: WorkerSection = _gpu_serving(2)
    gpu_serving_preemptible: WorkerSection = _gpu_serving(2)
    gpu_learner: WorkerSection = WorkerSection(
        max=1, cpus=11, memory_gib=76, shm_gib=24, gpus=1, aws="g6e.4xlarge", gcp="a2-highgpu-1g"
    )
    cpu_env_runner: WorkerSection = _env_runner(2)
    cpu_env_runner_preemptible: WorkerSection = _env_runner(4)

    @model_validator(mode="after")
    def _consistent(self) -> WorkersSection:
        for name in WORKER_TYPES:
            worker: WorkerSection = getattr(self, name)
            if worker.min > worker.max:
                raise ValueError(f"workers.{name}.min ({worker.min}) is above its max ({worker.max})")
            if worker.shm_gib >= worker.memory_gib:
                raise ValueError(
                    f"workers.{name}.shm_gib ({worker.shm_gib}) must be below its memory_gib ({worker.memory_gib}), of which it is part"
                )
        return self


class AWSSection(Section):
    """Amazon EC2."""

    region: _Word = "us-west-2"
    zones: _Word = Field("us-west-2a,us-west-2b", description="Nodes are placed in one of them.")
    image: _Word = Field(
        "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
        description="AMI with Docker and a driver for CUDA 13 (580 or newer).",
    )
    disk_gib: int = Field(200, ge=50)
    ssh_user: _Word = "ubuntu"

    @model_validator(mode="after")
    def _zones_are_there(self) -> AWSSection:
        for zone in self.zones.split(","):
            if not zone.startswith(self.region):
                raise ValueError(
                    f"aws.zones has {zone}, which is not in aws.region {self.region}: change them together"
                )
        return self


class GCPSection(Section):
    """Google Compute Engine."""

    project: _Word = "my-project"
    region: _Word = "us-central1"
    zone: _Word = "us-central1-a"
    image: _Word = Field(
        "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204-nvidia-580",
        description="With Docker and a driver for CUDA 13 (580 or newer).",
    )
    disk_gib: int = Field(200, ge=50)
    ssh_user: _Word = "ubuntu"

    @model_validator(mode="after")
    def _zone_is_there(self) -> GCPSection:
        if not self.zone.startswith(f"{self.region}-"):
            raise ValueError(f"gcp.zone {self.zone} is not in gcp.region {self.region}: change them together")
        return self


class OnPremSection(Section):
    """Machines of one's own, reached with SSH."""

    head: _Word = "10.0.0.10"
    hosts: dict[str, WorkerType] = Field(
        {"10.0.0.11": "gpu_serving", "10.0.0.12": "gpu_learner", "10.0.0.13": "cpu_env_runner"},
        description="Address of each worker, and its type.",
    )
    ssh_user: _Word = "ray"
    ssh_key: _Word = "~/.ssh/id_ed25519"

    @field_validator("hosts")
    @classmethod
    def _addresses(cls, hosts: dict[str, WorkerType]) -> dict[str, WorkerType]:
        if not hosts:
            raise ValueError("onprem.hosts is empty: name at least one worker by its address")
        for host in hosts:
            if not all(part.isalnum() for part in host.replace("-", ".").split(".")):
                raise ValueError(f"onprem.hosts: {host!r} is not an address or a host name")
        return hosts

    @model_validator(mode="after")
    def _head_is_no_worker(self) -> OnPremSection:
        if self.head in self.hosts:  # of which Ray's launcher says "AssertionError"
            raise ValueError(f"onprem.hosts has {self.head}, which is the head: name the workers alone")
        return self


class KubernetesSection(Section):
    """Where and how pods run."""

    namespace: _DNSName = "rl-vlm"
    operator_namespace: _DNSName = Field("kuberay-system", description="From which KubeRay's operator reaches pods.")
    monitoring_namespace: _DNSName = Field("monitoring", description="From which Prometheus reads the pods' metrics.")
    preemptible_selector: _Labels = Field(
        {"cloud.google.com/gke-spot": "true"},
        description="Labels of preemptible nodes; with Karpenter {karpenter.sh/capacity-type: spot}.",
    )
    preemptible_taint: str | None = Field("cloud.google.com/gke-spot", description="Taint of preemptible nodes.")
    gpu_taint: str = "nvidia.com/gpu"


class ClusterValues(Section):
    """Everything that people change."""

    name: _DNSName = Field("rl-vlm", description="Of the cluster.")
    grace_s: int = Field(
        120, ge=10, le=3600, description="Between SIGTERM and SIGKILL: a run saves a checkpoint in this time."
    )
    idle_timeout_s: int = Field(300, ge=30, description="A worker on which nothing runs is stopped after this long.")
    images: ImagesSection = ImagesSection()
    storage: StorageSection = StorageSection()
    job: JobSection = JobSection()
    service: ServiceSection = ServiceSection()
    head: HeadSection = HeadSection()
    workers: WorkersSection = WorkersSection()
    aws: AWSSection = AWSSection()
    gcp: GCPSection = GCPSection()
    onprem: OnPremSection = OnPremSection()
    kubernetes: KubernetesSection = KubernetesSection()

    @property
    def job_name(self) -> str:
        """Name of the RayJob."""
        return f"{self.name}-{self.job.run.lower().replace('_', '-').replace('.', '-')}"

    @model_validator(mode="after")
    def _job_is_named(self) -> ClusterValues:
        if len(self.job_name) > _LONGEST_JOB_NAME or self.job_name.endswith("-"):
            raise ValueError(
                f"name and job.run make the RayJob {self.job_name}, and KubeRay takes at most {_LONGEST_JOB_NAME} characters, the last a "
                "letter or digit: choose another job.run"
            )
        return self

    @model_validator(mode="after")
    def _placeable(self) -> ClusterValues:
        if not any(getattr(self.workers, name).max for name in WORKER_TYPES):
            raise ValueError("every type in workers has max 0: a run needs at least one, since the head runs no actors")
        return self
