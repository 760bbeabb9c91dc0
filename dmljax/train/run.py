"""A `Run`: the checked options of a config, and the objects that were built from them."""

import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import optax

from dmljax.adapt.trained import Adapted
from dmljax.data import pipeline
from dmljax.data.features import Cache
from dmljax.data.splits import Split
from dmljax.data.transforms.transform import Transform
from dmljax.methods.base import Method
from dmljax.train.devices import ClassRows, Shardings
from dmljax.train.options import Options
from dmljax.train.step import TrainState

# Starting processes takes seconds, in which threads decode some thousand images.
_IMAGES_FOR_WORKERS = 4000


class Selection(NamedTuple):
    """Which checkpoint is the result of a run.

    `rule` is what the config says: 'last', or a score of a split such as 'val/R@1'. `split` and
    `score` are its parts; for 'last' they name the score that `reload_best_at` compares.
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


class Metrics(NamedTuple):
    """The K of R@K, and the functions of all other scores by their display names."""

    ks: tuple[int, ...]
    ranking_fns: Mapping[str, Callable]
    clustering_fns: Mapping[str, Callable]
    embedding_fns: Mapping[str, Callable]


class Run(NamedTuple):
    """The checked options of a config, and everything that was built from them.

    A setting is read as `run.options.patience`; `config` is only written into the run folder.
    """

    config: dict[str, Any]  # with all defaults, for the run folder
    options: Options
    steps: int
    batch_size: int
    reload_steps: tuple[int, ...]
    selection: Selection
    evaluation_steps: Collection[int]
    metrics: Metrics
    checkpoint_steps: Collection[int]

    data_digest: str  # of the whole data set, wherever it lies
    train: Split
    held_out: Split | None
    test: Split
    sample_fn: Callable  # (groups, *, seed, step[, neighbors]) -> indices of the global batch
    neighbor_steps: Collection[int]  # after which the sampler gets the nearest classes
    sampler_note: str  # for the header, such as a smaller number of classes
    attention_note: str  # for the header; empty for a net without attention
    transform_fn: Transform
    eval_transform_fn: Transform
    normalize_fn: Callable
    normalization: str  # for the header
    input_note: str  # where the weights were trained on images that were prepared differently
    image_shape: tuple[int, ...]
    eval_image_shape: tuple[int, ...]

    net: nn.Module
    frozen: frozenset[str]  # the paths of the parameters that do not learn
    adapted: Adapted  # `method`, and the method that is deployed after training
    pooled_output: str | None  # of the net, that the head takes; None: it takes maps
    whiten: float  # of `centered_dense`: the power of the standard deviations
    cache: Cache | None  # where the splits have features as records
    start_arrays_fn: Callable  # (Start, image_shape) -> the arrays of the run to start from
    method: Method
    optimizer: optax.GradientTransformation
    init_fn: Callable  # (key, backbone=None, others=None) -> (params, model_state)

    shards: Shardings
    class_rows: ClassRows  # parameters with a row for each class
    shapes: TrainState  # jax.ShapeDtypeStruct for every array
    placements: TrainState  # a sharding for every array

    @property
    def weights(self) -> str | None:
        """The file of the pretrained weights of the net."""
        return self.options.net.get("weights")

    @property
    def start_folder(self) -> str | None:
        """The folder of the run whose parameters this run begins with."""
        return None if self.options.start is None else self.options.start.name

    @property
    def preprocessing(self) -> str:
        """The transform and the normalization of evaluation images, as text."""
        return f"{self.eval_transform_fn.title}, {self.normalization}"

    def workers(self, split: Split, *, is_endless: bool = False) -> int:
        """Returns how many processes read `split`, which is read once unless it `is_endless`."""
        runtime = self.options.runtime
        if runtime.workers is not None:
            return runtime.workers
        is_short = not is_endless and len(split) < _IMAGES_FOR_WORKERS
        if is_short or runtime.cache or self.shards.platform == "cpu":
            return 0
        return pipeline.workers_for(split)

    def pretraining(self, *, paths: bool = True) -> str:
        """Returns where the first backbone comes from; without `paths`, the last part of a path.

        A page contains no path, because people send pages to others.
        """
        source = self.start_folder or self.weights
        if source is None:
            return "none"
        name = str(source) if paths else pathlib.PurePath(source).name
        return f"the backbone of {name}" if self.start_folder else name

    @property
    def splits(self) -> dict[str, Split]:
        """The splits of the run by their names; 'val' only where classes are held out."""
        splits = {"train": self.train, "val": self.held_out, "test": self.test}
        return {name: split for name, split in splits.items() if split is not None}
