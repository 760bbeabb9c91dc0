"""The fields of a config: type, default, bounds and meaning of each. Imports no jax.

A default is written as in a config: the default "cosine" of a `Spec` is a name. Help, error
messages and the table in the documentation are generated from these dataclasses.
"""

# ruff: noqa: RUF009  `_option` returns a `dataclasses.field`.
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_REQUIRED = dataclasses.MISSING
# A number of steps, or '5 epochs' of the sampler.
Length = int | str


class Spec(dict):
    """A function with arguments, as a config names it: {"name": "triplet", "margin": 0.1}.

    A config may also hold the name alone. `config.registry` adds the function.
    """

    def __init__(self, values: Mapping[str, Any], partial: functools.partial | None = None):
        super().__init__(values)
        self._partial = partial

    @property
    def partial(self) -> functools.partial:
        """The function as a partial with the arguments of the config."""
        assert self._partial is not None, "this field was not resolved"
        return self._partial

    @property
    def function(self) -> Callable:
        """The function with the arguments of the config; the function itself if there are none."""
        return self.partial if self.partial.keywords else self.partial.func


def _option(default: Any, meaning: str, **rule: Any) -> Any:
    """Returns a field with its meaning and its rule.

    A rule has bounds (`least`, and the exclusive `below`), `choices` of text, or `settings`: the
    dataclasses that the value may be, by the names of the settings. A setting is written as its
    name or dict(name=..., ...); a completed config holds all of its fields.
    """
    metadata = {"meaning": meaning, **rule}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KMeans:
    """`evaluate.clustering='kmeans'`: NMI, AMI, ARI and F1 of a clustering by k-means."""

    name: str
    starts: int = _option(1, "starts of k-means; the lowest inertia counts", least=1)
    seeds: Sequence[int] = _option((0, 1, 2), "seeds; scores are averaged over them")
    only_last: bool = _option(False, "cluster only after the last step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """`pictures='page'`: the page of the run."""

    name: str
    projector: int = _option(0, "test images in TensorBoard's projector", least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movie(Page):
    """`pictures='movie'`: also a movie of the test embeddings, a frame for each evaluation."""

    frame_ms: int = _option(200, "milliseconds that a frame is shown", least=20)
    last_frame_ms: int = _option(3000, "milliseconds that the last frame is shown", least=20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastClasses:
    """`held_out=0.2`: the last training classes, in the order of their names, are held out."""

    name: str
    fraction: float = _option(0.2, "fraction of the classes", least=0, below=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """`held_out.name='fold'`: one block of the training classes is held out."""

    name: str
    index: int = _option(0, "the block, counted from 0", least=0)
    count: int = _option(4, "number of blocks", least=2)
    seed: int | None = _option(None, "seed that shuffles the classes first; None: their order")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """`start='runs/a'`: the run whose parameters this run begins with."""

    name: str
    takes: str = _option("all", "parameters to copy", choices=("all", "backbone"))
    mixed_with: str | None = _option(None, "a second run, to average parameters with")
    mixed_fraction: float = _option(0.5, "fraction of the second run in the average", least=0)

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

    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cached:
    """`features='cached'`: the features of a frozen backbone are computed once and kept on disk."""

    name: str
    views: int = _option(0, "augmented features of each image, to draw from; 0: none", least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delivery:
    """`runtime.data`: how the images of a step get to the devices."""

    name: str
    window: int = _option(1, "steps whose images are sent as one block", least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """When splits are embedded, and which scores are computed."""

    every: Length | None = _option(None, "interval, also '5 epochs'; None: after the last step")
    metrics: Sequence[Spec | str] = _option(
        ("all",), "names of metrics; 'all' stands for all that need no choice"
    )
    ks: Sequence[int] | None = _option(None, "the K of R@K; None: `metrics.KS`", least=1)
    depth: int | str | None = _option(
        None,
        "also report mAP and MRR at this cutoff; 'max_bin_count': the largest number of positives",
        least=1,
        choices=("max_bin_count",),
    )
    average: str = _option(
        "queries", "average over queries or over classes", choices=("queries", "classes")
    )
    clustering: KMeans | None = _option(
        "kmeans",
        "k-means behind NMI, AMI, ARI and F1, with `starts`, `seeds` and `only_last`; "
        "'scikit_learn' chooses centers and stops as published tables do, and is slow with "
        "thousands of classes; None: no clustering",
        settings={"kmeans": KMeans, "scikit_learn": KMeans},
    )
    batch_size: int = _option(256, "number of images embedded at once", least=1)
    knn: int = _option(0, "training images that vote on the class; 0: no vote", least=0)
    rankings: Sequence[str] = _option(
        (),
        "further rankings: by embeddings that `graph` refines, by mean distances of `abe`",
        choices=("refined", "mean_distance"),
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
    keep: int = _option(2, "number of checkpoints to keep, besides the best one", least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Options that cannot change a result, so that a continued run may change them."""

    workers: int | None = _option(
        None,
        "processes that read images; 0: threads of this process; None: half of the cores for image "
        "files with an accelerator and 8 cores or more, else 0",
        least=0,
    )
    cache: bool = _option(False, "keep decoded images in memory")
    data: Delivery = _option(
        "host",
        "where the training images are: the 'host' sends them step by step, or `window` steps at "
        "once; a 'device' holds and transforms all of them; 'auto': a device if possible",
        settings={"host": Delivery, "device": Delivery, "auto": Delivery},
    )
    devices: int | None = _option(None, "number of devices to use; None: all", least=1)
    deterministic: bool = _option(False, "repeat runs bit for bit on GPUs too")
    sharded: str | None = _option(
        None,
        "what is sharded over the devices: weights of 'classes'; 'state': also the state of the "
        "optimizer; 'all': also the parameters; None: only the batch",
        choices=("classes", "state", "all"),
    )
    features: str | None = _option(
        None, "folder of cached features; None: $DMLJAX_CACHE/features or ~/.cache/dmljax/features"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A whole config."""

    dataset: Spec = _option(
        _REQUIRED,
        "the data set and where it is stored; `image_fraction`, `class_fraction`: fractions of the "
        "training split; `full_epochs`: an epoch is as long as with all training images",
    )
    net: Spec = _option(_REQUIRED, "the backbone; `weights`: the file of its pretrained weights")
    loss: Spec = _option(_REQUIRED, "the loss, a function of `losses`")
    method: Spec = _option(_REQUIRED, "the training method: pairs, proxies, graph, dvml or abe")
    steps: Length = _option(_REQUIRED, "length of training: a number of steps, or '60 epochs'")
    seed: int = _option(0, "seed of initial values, batches and augmentation", least=0, below=2**63)
    size: int | None = _option(
        None, "`size` of both transforms, unless they set their own", least=1, below=8193
    )
    transform: Spec = _option("standard_train", "how a training image is cropped and distorted")
    eval_transform: Spec = _option("standard_eval", "how an image is prepared for evaluation")
    normalize: Spec | None = _option(
        None, "mean and std of the pixels; None: as the weights or the net require"
    )
    unreadable: str = _option(
        "raise", "what to do with an image that cannot be read", choices=("raise", "skip")
    )
    sampler: Spec = _option(
        {"name": "class_balanced", "classes": 32, "per_class": 4},
        "how batches are drawn; `every` ('1 epoch'): how often neighboring classes are searched",
    )
    miner: Spec | None = _option(
        None, "which pairs or triplets count in the loss, a function of `miners`; None: all"
    )
    chunk: int | None = _option(
        None, "number of images that the net embeds at once; None: the whole batch", least=1
    )
    optimizer: Spec = _option(
        {"name": "adam", "rate": 1e-4}, "the optimizer with its `rate`, `decay`, `groups`, ..."
    )
    schedule: Spec = _option("cosine", "the learning rate over time; `warmup`: steps of warm-up")
    reload_best_at: Sequence[Length] = _option(
        (), "steps after which the best parameters are loaded again"
    )
    start: Start | None = _option(
        None,
        "the folder of a run to take the first parameters from; `takes`: 'all' or 'backbone'; "
        "`mixed_with`, `mixed_fraction`: a second run to average them with, and its fraction",
        settings={"": Start},  # its name is a folder
    )
    distill: float = _option(
        0.0, "weight of a loss that keeps the similarities of the pretrained backbone", least=0
    )
    ladder: Sequence[dict] = _option(
        (), "steps of fine-tuning, each a name and the fields that it changes: docs/finetune.md"
    )
    trained: Spec = _option(
        "all",
        "which parameters learn: 'all'; 'last': all but the backbone; of the backbone only the "
        "last `count` 'blocks', the 'biases', low-rank adapters ('lora'), or 'prompts'",
    )
    features: Computed | Cached = _option(
        "computed",
        "with trained='last', 'cached' computes the features of the backbone once for every image "
        "and trains on them; `views`: augmented features of each image",
        settings={"computed": Computed, "cached": Cached},
    )
    held_out: LastClasses | Fold | None = _option(
        None,
        "training classes to hold out for validation: a fraction such as 0.2, or dict(name='fold', "
        "index=0, count=4, seed=None)",
        settings={"last": LastClasses, "fold": Fold},
    )
    select: str = _option(
        "last", "the step that counts: 'last', or the best by a score such as 'val/MAP@R'"
    )
    patience: int | None = _option(
        None, "stop after more than this many evaluations without improvement of `select`", least=0
    )
    evaluate: EvaluationOptions
    checkpoint: CheckpointOptions
    log_every: int = _option(20, "steps between two log lines", least=1)
    pictures: Page | None = _option(
        "page",
        "'page': the page of the run; 'movie': also a movie of the test embeddings, with "
        "`frame_ms` and `last_frame_ms`; `projector`: images in TensorBoard's projector",
        settings={"page": Page, "movie": Movie},
    )
    notes: str = _option("", "your own notes")
    runtime: RuntimeOptions

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
    if dataclasses.is_dataclass(field.type)
}


def fields_of(section: Any) -> dict[str, dataclasses.Field]:
    """Returns the fields of a dataclass of options by their names."""
    return {field.name: field for field in dataclasses.fields(section)}


def defaults_of(section: Any) -> dict[str, Any]:
    """Returns the defaults of the fields of a dataclass of options; {} for a section."""
    defaults: dict[str, Any] = {}
    for name, field in fields_of(section).items():
        if name in SECTIONS:
            defaults[name] = {}
        elif field.default_factory is not _REQUIRED:
            defaults[name] = field.default_factory()
        elif field.default is not _REQUIRED:
            defaults[name] = field.default
    return defaults


def takes(field: dataclasses.Field, type_: type) -> bool:
    """Returns True if the value of a field may be of a type, such as `Spec` or `NoneType`."""
    return type_ in (field.type, *typing.get_args(field.type))


def allowed_values(field: dataclasses.Field) -> str:
    """Returns the values of a field with bounds or choices as text: "1 or more, or None"."""
    rule, words = field.metadata, []
    if "below" in rule:
        words.append(f"at least {rule['least']} and below {rule['below']}")
    elif "least" in rule:
        words.append(f"{rule['least']} or more")
    words += map(repr, rule.get("choices", ()))
    words += ["None"] if takes(field, type(None)) else []
    return (", or " if " " in words[0] else " or ").join(words)


def rows(section: Any = Options, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields `(field, default, meaning)` of every field, for help and for the documentation."""
    defaults = defaults_of(section)
    for name, field in fields_of(section).items():
        if name in SECTIONS:
            yield from rows(SECTIONS[name], f"{name}.")
            continue
        default = f"default {defaults[name]!r}" if name in defaults else "required"
        meaning = field.metadata["meaning"]
        if {"least", "choices"} & set(field.metadata):
            meaning += f" ({allowed_values(field)})"
        yield f"{prefix}{name}", default, meaning
