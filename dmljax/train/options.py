"""The fields of a config: type, default and meaning of each. Imports no jax.

Help, error messages and the table in the documentation are generated from these dataclasses.
"""

# ruff: noqa: RUF009  `_option` returns a `dataclasses.field`.
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from dmljax.files import schema

# A number of steps, or '5 epochs' of the sampler.
Length = int | str
Natural = Annotated[int, schema.at_least(0)]
Positive = Annotated[int, schema.at_least(1)]
_Fraction = Annotated[float, schema.Limit(lambda x: 0 <= x < 1, "at least 0 and below 1")]
_Seed = Annotated[int, schema.Limit(lambda x: 0 <= x < 2**63, "at least 0 and below 2**63")]
_Size = Annotated[int, schema.between(1, 8192)]
_Weight = Annotated[float, schema.at_least(0)]


class Spec(dict):
    """A function with arguments, as a config names it: {"name": "triplet", "margin": 0.1}.

    A config may also hold the name alone. `config.registry` adds the function.
    """

    words = "a name or dict(name='...', ...)"

    def __init__(self, values: Any, partial: functools.partial | None = None):
        super().__init__(values)
        self._partial = partial

    @classmethod
    def from_json(cls, value: Any, name: str) -> "Spec":
        """Returns the spec that a config writes as a name or a dict, with tuples for lists."""
        values = {"name": value} if isinstance(value, str) else value
        if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
            raise schema.Misfit(name, f"{name} must be {cls.words}, got {value!r}")
        return cls(_tuples(values))

    def with_defaults(self) -> dict[str, Any]:
        """Returns the spec with the plain defaults of its function, for digests.

        Defaults that are functions are left out. Functions in the spec stay names.
        """
        parameters = inspect.signature(self.partial.func).parameters.values()
        plain = (bool, int, float, str, tuple, type(None))
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return {k: v for k, v in defaults.items() if isinstance(v, plain)} | self

    @property
    def partial(self) -> functools.partial:
        """The function as a partial with the arguments of the config."""
        assert self._partial is not None, "this field was not resolved"
        return self._partial

    @property
    def function(self) -> Callable:
        """The function with the arguments of the config; the function itself if there are none."""
        return self.partial if self.partial.keywords else self.partial.func


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if type(value) in (list, tuple) else value


def _option(default: Any, meaning: str) -> Any:
    """Returns a field with its meaning; a field without a default must be set."""
    metadata = {"meaning": meaning}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: Spec(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


_REQUIRED = dataclasses.MISSING

# Settings: a config writes one as its name, as `True`, as its first number, or as a dict.


@dataclasses.dataclass(frozen=True, kw_only=True)
class KMeans:
    """`evaluate.clustering='kmeans'`: scores of a clustering by k-means."""

    name: Literal["kmeans", "scikit_learn"] = "kmeans"
    starts: Positive = _option(1, "starts of k-means; the lowest inertia counts")
    seeds: Sequence[int] = _option((0, 1, 2), "seeds; scores are averaged over them")
    only_last: bool = _option(False, "cluster only after the last step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """`pictures='page'`: the page of the run."""

    name: Literal["page"] = "page"
    projector: Natural = _option(0, "test images in TensorBoard's projector")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movie:
    """`pictures='movie'`: also a movie of the test embeddings, a frame for each evaluation."""

    name: Literal["movie"] = "movie"
    projector: Natural = _option(0, "test images in TensorBoard's projector")
    frame_ms: Annotated[int, schema.at_least(20)] = _option(200, "milliseconds of a frame")
    last_frame_ms: Annotated[int, schema.at_least(20)] = _option(3000, "those of the last one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastClasses:
    """`held_out=0.2`: the last training classes, in the order of their names, are held out."""

    name: Literal["last"] = "last"
    fraction: _Fraction = _option(0.2, "fraction of the classes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """`held_out.name='fold'`: one block of the training classes is held out."""

    name: Literal["fold"] = "fold"
    index: Natural = _option(0, "the block, counted from 0")
    count: Annotated[int, schema.at_least(2)] = _option(4, "number of blocks")
    seed: int | None = _option(None, "seed that shuffles the classes first; None: their order")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """`start='runs/a'`: the run whose parameters this run begins with."""

    name: str = ""  # a study fills it in
    takes: Literal["all", "backbone"] = _option("all", "parameters to copy")
    mixed_with: str | None = _option(None, "a second run, to average parameters with")
    mixed_fraction: _Weight = _option(0.5, "fraction of the second run in the average")

    def __post_init__(self) -> None:
        if self.mixed_with is not None and (self.takes != "all" or self.mixed_fraction > 1):
            raise ValueError(
                f"start.mixed_with={self.mixed_with!r} averages all parameters: it needs "
                f"start.takes='all', not {self.takes!r}, and a start.mixed_fraction from 0 to 1, "
                f"not {self.mixed_fraction}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computed:
    """`features='computed'`: the backbone runs in every step."""

    name: Literal["computed"] = "computed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached:
    """`features='cached'`: the features of a frozen backbone are computed once and kept on disk."""

    name: Literal["cached"] = "cached"
    views: Natural = _option(0, "augmented features of each image, to draw from; 0: none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """`runtime.data`: how the images of a step get to the devices."""

    name: Literal["host", "device", "auto"] = "host"
    window: Positive = _option(1, "steps whose images are sent as one block")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """When splits are embedded, and which scores are computed."""

    every: Length | None = _option(None, "interval, also '5 epochs'; None: after the last step")
    metrics: Sequence[Spec] = _option(
        (Spec({"name": "all"}),), "names of metrics; 'all' stands for all that need no choice"
    )
    ks: Sequence[Positive] | None = _option(None, "the K of R@K; None: `metrics.KS`")
    depth: Positive | Literal["max_bin_count"] | None = _option(
        None,
        "also report mAP and MRR at this cutoff; 'max_bin_count': the largest number of positives",
    )
    average: Literal["queries", "classes"] = _option(
        "queries", "average over queries or over classes"
    )
    clustering: KMeans | None = _option(
        KMeans(),
        "k-means behind the scores of clusters; 'scikit_learn' follows the rules of published "
        "tables, and is slow with thousands of classes; None: no clustering",
    )
    batch_size: Positive = _option(256, "number of images embedded at once")
    knn: Natural = _option(0, "training images that vote on the class; 0: no vote")
    rankings: Sequence[Literal["refined", "mean_distance"]] = _option(
        (), "further rankings: by embeddings that `graph` refines, by mean distances of `abe`"
    )
    frozen: bool | None = _option(
        None, "also score the pretrained backbone as it is; None: if the run has one"
    )
    call: Spec | None = _option(None, "your function 'my_package.my_module:f' of an evaluation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When the state of a run is saved."""

    every: Length | None = _option(
        None, "interval, also '1 epoch'; None: `evaluate.every`, else a fifth of the run"
    )
    keep: Positive = _option(2, "number of checkpoints to keep, besides the best one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Options that cannot change a result, so that a continued run may change them."""

    workers: Natural | None = _option(
        None,
        "processes that read images; 0: threads of this process; None: half of the cores for image "
        "files with an accelerator and 8 cores or more, else 0",
    )
    cache: bool = _option(False, "keep decoded images in memory")
    data: Delivery = _option(
        Delivery(),
        "where the training images are: the 'host' sends them step by step, or `window` steps at "
        "once; a 'device' holds and transforms all of them; 'auto': a device if possible",
    )
    devices: Positive | None = _option(None, "number of devices to use; None: all")
    deterministic: bool = _option(False, "repeat runs bit for bit on GPUs too")
    sharded: Literal["classes", "state", "all"] | None = _option(
        None,
        "what is sharded over the devices: weights of 'classes'; 'state': also the state of the "
        "optimizer; 'all': also the parameters; None: only the batch",
    )
    features: str | None = _option(
        None, "folder of cached features; None: $DMLJAX_CACHE/features or ~/.cache/dmljax/features"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A whole config."""

    title_in_errors: typing.ClassVar[str] = "the config"

    dataset: Spec = _option(
        _REQUIRED,
        "the data set and where it is stored; `image_fraction`, `class_fraction`: fractions of the "
        "training split; `full_epochs`: an epoch is as long as with all training images",
    )
    net: Spec = _option(_REQUIRED, "the backbone; `weights`: the file of its pretrained weights")
    loss: Spec = _option(_REQUIRED, "the loss, a function of `losses`")
    method: Spec = _option(_REQUIRED, "the training method, a function of `methods`")
    steps: Length = _option(_REQUIRED, "length of training: a number of steps, or '60 epochs'")
    seed: _Seed = _option(0, "seed of initial values, batches and augmentation")
    size: _Size | None = _option(None, "`size` of both transforms, unless they set their own")
    transform: Spec = _option(
        {"name": "standard_train"}, "how a training image is cropped and distorted"
    )
    eval_transform: Spec = _option(
        {"name": "standard_eval"}, "how an image is prepared for evaluation"
    )
    normalize: Spec | None = _option(
        None, "mean and std of the pixels; None: as the weights or the net require"
    )
    unreadable: Literal["raise", "skip"] = _option(
        "raise", "what to do with an image that cannot be read"
    )
    sampler: Spec = _option(
        {"name": "class_balanced", "classes": 32, "per_class": 4},
        "how batches are drawn; `every` ('1 epoch'): how often neighboring classes are searched",
    )
    miner: Spec | None = _option(
        None, "which pairs or triplets count in the loss, a function of `miners`; None: all"
    )
    chunk: Positive | None = _option(
        None, "number of images that the net embeds at once; None: the whole batch"
    )
    optimizer: Spec = _option(
        {"name": "adam", "rate": 1e-4}, "the optimizer with its `rate`, `decay`, `groups`, ..."
    )
    schedule: Spec = _option(
        {"name": "cosine"}, "the learning rate over time; `warmup`: steps of warm-up"
    )
    reload_best_at: Sequence[Length] = _option(
        (), "steps after which the best parameters are loaded again"
    )
    start: Start | None = _option(
        None, "the folder of a run to take the first parameters from, or from a mean of two"
    )
    distill: _Weight = _option(
        0.0, "weight of a loss that keeps the similarities of the pretrained backbone"
    )
    ladder: Sequence[dict] = _option(
        (), "steps of fine-tuning, each a name and the fields that it changes: docs/finetune.md"
    )
    trained: Spec = _option(
        {"name": "all"},
        "which parameters learn: 'all'; 'last': all but the backbone; of the backbone only "
        "'blocks', 'biases', low-rank adapters ('lora'), or 'prompts'",
    )
    features: Computed | Cached = _option(
        Computed(), "with trained='last', 'cached' computes the backbone once for every image"
    )
    held_out: LastClasses | Fold | None = _option(
        None, "training classes to hold out for validation: a fraction such as 0.2, or a 'fold'"
    )
    select: str = _option(
        "last", "the step that counts: 'last', or the best by a score such as 'val/MAP@R'"
    )
    patience: Natural | None = _option(
        None, "stop after more than this many evaluations without improvement of `select`"
    )
    evaluate: EvaluationOptions = EvaluationOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    log_every: Positive = _option(20, "steps between two log lines")
    pictures: Page | Movie | None = _option(
        Page(), "'page': the page of the run; 'movie': also a movie of the test embeddings"
    )
    notes: str = _option("", "your own notes")
    runtime: RuntimeOptions = RuntimeOptions()

    def __post_init__(self) -> None:
        if self.patience is not None and self.select == "last":
            raise ValueError(
                f"patience={self.patience} needs a score to watch: --config.select=val/MAP@R, or "
                "another score"
            )

    @property
    def has_pretrained(self) -> bool:
        """True if the run begins with a backbone that was trained before."""
        return bool(self.start or self.net.get("weights"))


# The dataclasses of the sections of a config by their names.
SECTIONS: dict[str, Any] = {
    field.name: field.type
    for field in dataclasses.fields(Options)
    if dataclasses.is_dataclass(field.type) and "meaning" not in field.metadata
}


def rows(section: Any = Options, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields `(field, default, meaning)` of every field, for help and for the documentation."""
    for field in dataclasses.fields(section):
        if field.name in SECTIONS:
            yield from rows(SECTIONS[field.name], f"{field.name}.")
            continue
        factory = field.default_factory
        value: Any = field.default if factory is _REQUIRED else factory()
        value = getattr(value, "name", value)
        if isinstance(value, dict) and set(value) == {"name"}:
            value = value["name"]
        default = "required" if value is _REQUIRED else f"default {value!r}"
        allowed, meaning = schema.words(field.type), field.metadata["meaning"]
        if "dict(" not in allowed and ("at least" in allowed or "'" in allowed):
            meaning += f" ({allowed})"
        yield f"{prefix}{field.name}", default, meaning
