"""The fields of a config: default, type, smallest value and meaning of each. Imports no jax.

Help, error messages and the table of docs/config.md are made from these dataclasses.
"""

# ruff: noqa: RUF009  `_option` returns a `dataclasses.field`.
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# A name and keywords of a function, such as {"name": "triplet", "margin": 0.1}. A config may also
# hold the name alone.
Spec = Mapping[str, Any]
# Steps, or '5 epochs' of the sampler.
Length = int | str


def _option(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """Returns a field with its meaning, its bounds (`below` is exclusive) and its names."""
    metadata = {"meaning": meaning, "least": least, "below": below, "choices": choices}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _required(meaning: str) -> Any:
    return _option(dataclasses.MISSING, meaning)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """When splits are embedded, and which scores are computed."""

    every: Length | None = _option(None, "steps, or '5 epochs'; None: once, after the last step")
    metrics: tuple | None = _option(None, "names of the scores; None: all")
    extra: tuple = _option((), "names of more scores, added to `metrics`")
    ks: Sequence[int] = _option((1, 2, 4, 8), "the K of R@K")
    depth: int | str | None = _option(
        None,
        "mAP and MRR also of rankings that are cut here; 'max_bin_count': the most positives",
        least=1,
        choices=("max_bin_count",),
    )
    average: str = _option(
        "queries",
        "what counts the same in a mean score",
        choices=("queries", "classes"),
    )
    clustering: bool | str = _option(
        True, "compute NMI, AMI, ARI and F1; 'end': only after the last step", choices=("end",)
    )
    kmeans: str = _option(
        "plain",
        "'scikit_learn': the best of several candidates for each start, 300 iterations at most, "
        "an end by tolerance, as published tables have it; slow with thousands of classes",
        choices=("plain", "scikit_learn"),
    )
    starts: int = _option(1, "starts of k-means; the one with the least inertia counts", least=1)
    batch_size: int = _option(256, "images that are embedded at a time", least=1)
    knn: int = _option(0, "training images that vote on the label of a test image", least=0)
    seeds: Sequence[int] = _option((0, 1, 2), "seeds of k-means, over which scores are averaged")
    refine: bool = _option(False, "also score embeddings that the method `graph` refines")
    mean_distance: bool = _option(False, "also rank by the mean distance of the learners of `abe`")
    frozen: bool | None = _option(
        None,
        "score the pretrained backbone as it is, before training, and compare at the end; None: "
        "where a run starts from one",
    )
    frames: bool = _option(False, "draw the test embeddings at each evaluation, for a movie")
    projector: int = _option(0, "test images in TensorBoard's projector", least=0)
    frame_ms: int = _option(200, "milliseconds of a frame of the movie", least=20)
    last_frame_ms: int = _option(3000, "milliseconds of the last frame of the movie", least=20)
    call: str | None = _option(None, "your function, 'my_package.my_module:f', called afterwards")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When the state of a run is saved."""

    every: Length | None = _option(
        None, "steps, or '1 epoch'; None: as `evaluate.every`, else a fifth of the run"
    )
    keep: int = _option(2, "checkpoints that are kept, beside the best one", least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """What cannot change a result, and so may differ when a run is continued."""

    workers: int | None = _option(
        None,
        "processes that read images; 0: threads of this process; None: with an accelerator and 8 "
        "cores or more, half as many as cores, for image files; else 0",
        least=0,
    )
    cache: bool = _option(False, "keep decoded images in memory")
    data: str = _option(
        "host",
        "what keeps the training images: the 'host' sends the images of a step; a 'device' has all "
        "and is sent the rows of a step, and transforms them; 'auto': the devices if they can",
        choices=("host", "device", "auto"),
    )
    window: int = _option(1, "with data='host', steps whose images are sent as one block", least=1)
    devices: int | None = _option(None, "devices that are used; None: all", least=1)
    deterministic: bool = _option(False, "runs repeat bit for bit on GPUs, too; on CPUs they do")
    sharded: str | None = _option(
        None,
        "what devices share: the weights of 'classes'; also the 'state' of the optimizer; 'all': "
        "also the parameters",
        choices=("classes", "state", "all"),
    )
    features: str | None = _option(
        None,
        "the folder of cached features; None: features in $DMLJAX_CACHE or ~/.cache/dmljax",
    )
    keep_programs: bool = _option(
        True, "keep compiled programs in $DMLJAX_CACHE/compiled or ~/.cache/dmljax/compiled"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A whole config."""

    dataset: Spec = _required(
        "a data set and where it lies; `image_share`, `class_share`: a part of the training split; "
        "`full_epochs`: an epoch has as many steps as with all training images"
    )
    net: Spec = _required("a backbone; `weights`: the file of its pretrained weights")
    loss: Spec = _required("a function of `losses`")
    method: Spec = _required("what is trained: pairs, proxies, graph, dvml or abe")
    steps: Length = _required("the length of training: a number, or '60 epochs'")
    seed: int = _option(
        0, "the seed of initial values, batches and augmentation", least=0, below=2**63
    )
    size: int | None = _option(
        None, "`size` of both transforms, unless they set it", least=1, below=8193
    )
    transform: Spec = _option("standard_train", "how a training image is cropped and distorted")
    eval_transform: Spec = _option("standard_eval", "how an image is prepared for evaluation")
    normalize: Spec | None = _option(None, "mean and deviation of pixels; None: as the weights say")
    unreadable: str = _option(
        "raise", "what to do with an image that cannot be read", choices=("raise", "skip")
    )
    sampler: Spec = _option(
        {"name": "class_balanced", "classes": 32, "per_class": 4}, "which images form a batch"
    )
    neighbors_every: Length = _option(
        "1 epoch",
        "when the classes nearest to each other are searched, for samplers that take `neighbors`",
    )
    miner: Spec | None = _option(None, "a function of `miners`: which pairs count in the loss")
    chunk: int | None = _option(None, "images that the net sees at a time; None: all", least=1)
    tile: int | None = _option(
        None,
        "rows that a pair loss compares with as many rows at a time; None: all with all",
        least=1,
    )
    optimizer: Spec = _option({"name": "adam", "rate": 1e-4}, "its `rate`, `decay`, `groups`, ...")
    schedule: Spec = _option("cosine", "the learning rate over time, with `warmup`")
    reload_best_at: tuple = _option((), "steps after which the best parameters are loaded again")
    start: str | None = _option(None, "the folder of a run: this one begins with its parameters")
    distill: float = _option(
        0.0,
        "weight of the distance between similarities in a batch by the embeddings and by the "
        "backbone before training",
        least=0,
    )
    mixed_with: str | None = _option(
        None,
        "with `start`, the folder of a second run: the first parameters are averages of both",
    )
    mixed_share: float = _option(0.5, "with `mixed_with`, the share of the second run", least=0)
    ladder: Sequence[dict] = _option(
        (),
        "steps of fine-tuning, each with a name and the fields that it changes: docs/finetune.md",
    )
    start_takes: str = _option("all", "what is taken from `start`", choices=("all", "backbone"))
    trained: Spec = _option(
        "all",
        "what learns: 'all'; 'last': not the backbone; of the backbone the last `count` 'blocks', "
        "the 'biases', low-rank adapters ('lora'), or 'prompts' of a vision transformer",
    )
    features: str = _option(
        "computed",
        "with trained='last': 'cached' computes the features of the backbone once for every image, "
        "keeps them on disk, and trains on them",
        choices=("computed", "cached"),
    )
    views: int = _option(
        0,
        "with features='cached': features of each training image after `transform`, of which a "
        "step draws one; 0: one feature of each image, without augmentation",
        least=0,
    )
    validation: float = _option(0.0, "share of training classes held out", least=0, below=1)
    fold: int | None = _option(None, "the block of training classes that is held out, from 0")
    folds: int = _option(4, "blocks into which `fold` divides the training classes")
    fold_seed: int | None = _option(None, "shuffles the classes before they are divided", least=0)
    select: str = _option("last", "the step that counts: the 'last', or the best by 'val/MAP@R'")
    patience: int | None = _option(
        None, "the run ends after more evaluations than this without a new best score", least=0
    )
    evaluate: EvaluationOptions = EvaluationOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    log_every: int = _option(20, "steps between two lines of the log", least=1)
    pictures: bool = _option(True, "write the page of the run, and the movie of its frames")
    notes: str = _option("", "anything that you want to remember")
    runtime: RuntimeOptions = RuntimeOptions()


SECTIONS = {
    "evaluate": EvaluationOptions,
    "checkpoint": CheckpointOptions,
    "runtime": RuntimeOptions,
}


def fields_of(section: Any) -> dict[str, dataclasses.Field]:
    """The fields of a dataclass of options by their names."""
    return {field.name: field for field in dataclasses.fields(section)}


def defaults_of(section: Any) -> dict[str, Any]:
    """The defaults of the fields of a dataclass of options; a section has an empty dict."""
    defaults: dict[str, Any] = {}
    for name, field in fields_of(section).items():
        if name in SECTIONS:
            defaults[name] = {}
        elif field.default_factory is not dataclasses.MISSING:
            defaults[name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[name] = field.default
    return defaults


def allowed_values(field: dataclasses.Field) -> str:
    """The values of a field that has bounds or choices, in words: "1 or more, or None"."""
    types, rule = str(field.type).split(" | "), field.metadata
    words = ["True", "False"] if "bool" in types else []
    if rule["below"] is not None and "int" in types:
        words.append(f"a number from {rule['least']} to {rule['below'] - 1}")
    elif rule["below"] is not None:
        words.append(f"a share of {rule['least']} or more and less than {rule['below']}")
    elif rule["least"] is not None:
        words.append(f"{rule['least']} or more")
    words += map(repr, rule["choices"])
    words += ["None"] if "None" in types else []
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])}{',' * (' or ' in words[0])} or {words[-1]}"


def rows() -> Iterator[tuple[str, str, str]]:
    """`(field, default, meaning)` of every field, for help and for docs/config.md."""
    for section, options in {"": Options, **SECTIONS}.items():
        prefix = f"{section}." if section else ""
        defaults = defaults_of(options)
        for name, field in fields_of(options).items():
            if not section and name in SECTIONS:
                continue
            default = f"default {defaults[name]!r}" if name in defaults else "required"
            rule = field.metadata
            allowed = allowed_values(field) if rule["choices"] or rule["least"] is not None else ""
            meaning = rule["meaning"]
            yield f"{prefix}{name}", default, f"{meaning} ({allowed})" if allowed else meaning
