"""The base of all sections of the configuration, and how sections are walked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from rl_vlm.files import resolved

# Values within bounds.
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
# Absolute, because other processes have other working directories.
FilePath = Annotated[str, AfterValidator(lambda path: str(resolved(path)))]
Plugin = Annotated[str, AfterValidator(lambda name: str(resolved(name)) if name.endswith(".py") else name)]
Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam, which rejects other values when a learner starts


class OnlyWith(NamedTuple):
    """Keys that are read only where the key `chooser` beside them has one of `values` (or is set, without values)."""

    keys: tuple[str, ...]
    chooser: str
    values: tuple[Any, ...] = ()


class WrittenFloat(float):
    """A number of YAML that is its own spelling where a text is wanted, such as the name 1e3 or 1.10."""

    spelling = ""

    def __str__(self) -> str:
        return self.spelling


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return float(value) if isinstance(value, float) else value


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not changed after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True, ser_json_inf_nan="constants"
    )

    place: ClassVar[str] = ""  # the section's name with a point, `serving.`, for messages
    conditional: ClassVar[tuple[OnlyWith, ...]] = ()

    def problems(self) -> Iterator[str]:
        """A sentence, without a line break, on each contradiction between valid values. Keys have their full names."""
        for rule in self.conditional:
            for key in self.changed(*rule.keys) if not self.reads(rule) else ():
                name, values = f"{self.place}{rule.chooser}", " or ".join(map(str, rule.values))
                chosen = getattr(self, rule.chooser)
                now = f"with {name} {'null' if chosen is None else chosen}" if values else f"without {name}"
                instead = f"{name} to {values}" if values else name
                yield f"{self.place}{key} has no effect {now}: remove it, or set {instead}"

    def reads(self, rule: OnlyWith) -> bool:
        chosen = getattr(self, rule.chooser)
        return chosen in rule.values if rule.values else bool(chosen)

    @field_validator("*")
    @classmethod
    def _has_plain_values(cls, value: Any) -> Any:
        return _plain(value)

    @model_validator(mode="after")
    def _has_no_problems(self) -> Self:
        if sentences := list(self.problems()):
            raise ValueError("\n".join(sentences))
        return self

    def changed(self, *keys: str) -> Iterator[str]:
        """The keys that differ from their default: a saved configuration holds the defaults of all keys."""
        for key in keys:
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if getattr(self, key) not in (None, default):
                yield key


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, perhaps optionally; None for a field that holds a value."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def keys_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted names of all keys, those of sections before what is in them."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from keys_of(inner, f"{prefix}{name}.")


class PlainLogging(Section):
    checkpoint_every: Count = 25  # Iterations between checkpoints.
    keep_checkpoints: Count = 3  # Older checkpoints are deleted.
    tensorboard: bool = True  # Write TensorBoard event files into the run folder.
    callbacks: list[str] = []  # Your own code after iterations and evaluations: `path/to/file.py:Name` of a Callback.
    wandb_project: str = "rl-vlm"  # Project on Weights & Biases, used where WANDB_API_KEY is set.


class TrainLogging(PlainLogging):
    # Every figure as a Ray metric `ray_rl_vlm_*` too; null: where the run joins a cluster.
    ray_metrics: bool | None = None
    traces: Natural = 0  # Iterations between traces (`traces/*.jsonl`, OpenTelemetry); 0: none.


class LoggingSection(TrainLogging):
    trajectories_every: Natural = 10  # Iterations between dumps of sampled trajectories; 0: none.
    trajectories_per_dump: Count = 64  # Trajectories that a dump holds at most.
    kept_items: Natural = 512  # Held-out items whose episodes are kept at each evaluation; 0: none.
    show_episodes: bool = True  # Print one episode of each dump: reading answers is how a gamed reward is found.


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
    replicas_on: _ResourceName | None = None  # Where replicas of the model run; null: anywhere.
    learners_on: _ResourceName | None = None  # Where learner actors run; one in the driver stays there.
    env_runners_on: _ResourceName | None = None  # Where env runners run.

    @property
    def node_kinds(self) -> set[str]:
        return {name for name in (self.replicas_on, self.learners_on, self.env_runners_on) if name is not None}
