"""What a config becomes: a `Run` of options, functions, shapes and placements, all typed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import optax

from dmljax.data.splits import Split
from dmljax.methods.base import Method
from dmljax.train.devices import Shardings
from dmljax.train.start import Carried
from dmljax.train.step import TrainState

__all__ = [
    "CheckpointOptions",
    "EvaluationOptions",
    "Run",
    "RuntimeOptions",
    "Selection",
]


class Selection(NamedTuple):
    """Which checkpoint is the result of a run.

    `rule` is what the config says: 'last', or a score of a split such as 'val/R@1'. `split` and
    `score` are those of the rule; for 'last' they are the score that `reload_best_at` compares.
    """

    rule: str
    split: str
    score: str

    @property
    def is_last(self) -> bool:
        return self.rule == "last"

    @property
    def key(self) -> str:
        return f"{self.split}/{self.score}"


class EvaluationOptions(NamedTuple):
    """When splits are embedded, and which scores are computed."""

    every: Collection[int]  # steps
    batch_size: int
    ks: tuple[int, ...]
    ranking_fns: Mapping[str, Callable]
    clustering_fns: Mapping[str, Callable]
    embedding_fns: Mapping[str, Callable]
    clusters_at_end: bool  # not at the evaluations before
    seeds: tuple[int, ...]
    starts: int
    depth: int | str | None
    call_fn: Callable | None
    knn: int
    refine: bool
    mean_distance: bool
    average: str  # 'queries' or 'classes'
    frames: bool
    projector: int
    frame_ms: int
    last_frame_ms: int


class CheckpointOptions(NamedTuple):
    every: Collection[int]  # steps
    keep: int


class RuntimeOptions(NamedTuple):
    """Options that cannot change a result."""

    workers: int
    cache: bool
    deterministic: bool
    sharded: tuple[str, ...]


class Run(NamedTuple):
    """Everything that the train loop and the evaluation need. Only `build` reads `config`."""

    config: dict[str, Any]  # with all defaults, for the run folder
    seed: int
    steps: int
    batch_size: int
    chunk: int | None
    log_every: int
    reload_best_at: tuple[int, ...]
    selection: Selection
    patience: int | None  # evaluations that the best one may be old before the run ends
    evaluation: EvaluationOptions
    checkpoint: CheckpointOptions
    runtime: RuntimeOptions
    pictures: bool

    dataset: str
    data_digest: str  # of the whole data set, wherever it lies
    train: Split
    held_out: Split | None
    test: Split
    unreadable: str
    sample_fn: Callable  # (groups, *, seed, step) -> indices of the global batch
    sampler_note: str  # for the header, such as how soon every image is used
    transform_fn: Callable
    eval_transform_fn: Callable
    normalize_fn: Callable
    image_shape: tuple[int, ...]
    eval_image_shape: tuple[int, ...]

    net_name: str
    net: nn.Module
    weights: str | None
    start: str | None  # the folder of a run whose parameters are the first
    carried: Carried | None  # what that run may set beside the backbone
    method: Method
    optimizer: optax.GradientTransformation
    init_fn: Callable  # (key, backbone=None, others=None) -> the first TrainState

    shards: Shardings
    shapes: TrainState  # jax.ShapeDtypeStruct for every array
    placements: TrainState  # a sharding for every array

    @property
    def pretraining(self) -> str:
        """Where the first backbone comes from."""
        if self.start is not None:
            return f"the backbone of {self.start}"
        return self.weights or "none"

    @property
    def splits(self) -> dict[str, Split]:
        """The splits of the run by their names; 'val' only where classes are held out."""
        splits = {"train": self.train, "val": self.held_out, "test": self.test}
        return {name: split for name, split in splits.items() if split is not None}
