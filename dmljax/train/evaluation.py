"""Evaluation in two layers: `embed` a split, `score` its embeddings. `Evaluator` calls both."""

import collections
import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dmljax import metrics, ops, retrieval, vectors
from dmljax.data.splits import Search, Split
from dmljax.methods.assemble import with_backbone
from dmljax.methods.base import Inspect
from dmljax.metrics.reports import values_of_queries
from dmljax.train import features, hosts, optimizers
from dmljax.train.devices import with_rows
from dmljax.train.features import embed
from dmljax.train.interrupts import Interrupts
from dmljax.train.run import Run
from dmljax.train.step import TrainState

MAIN = "embedding"  # the name of the main embedding; its parts have other names
MEAN = "learners"  # the name under which the mean of several parts is reported
_MAX_PIXELS = 64 * 64 * 3
_MAX_PIXEL_IMAGES = 20_000


def score(
    embeddings: np.ndarray,
    split: Split,
    *,
    ks: Sequence[int] = metrics.KS,
    ranking_fns: Mapping[str, Callable] = metrics.RANKING_FNS,
    clustering_fns: Mapping[str, Callable] = metrics.CLUSTERING_FNS,
    embedding_fns: Mapping[str, Callable] = types.MappingProxyType({}),
    seeds: Sequence[int] = (0, 1, 2),
    starts: int = 1,
    kmeans_options: Mapping[str, Any] = types.MappingProxyType({}),
    depth: int | str | None = None,
    average: str = "queries",
    devices: Sequence[Any] | None = None,
    sum_fn: Callable[[np.ndarray], np.ndarray] | None = None,
) -> dict[str, float]:
    """Computes retrieval scores by the queries and gallery of a split, and clustering scores.

    With `sum_fn`, such as `hosts.summed`, every process must call this. It ranks a part of the
    queries and finds the clusters of a part of the points; the results are gathered.

    Images that could not be read (rows of NaN) are left out, and counted in 'unreadable'. `ks` for
    which there are too few images are left out. `embedding_fns` are functions of (embeddings,
    labels). With `depth`, a number or 'max_bin_count' (the most positives that a query has), mAP
    and MRR are also computed of rankings that are cut there.
    """
    search = split.search(embeddings)
    if depth is not None:
        ranking_fns = {**ranking_fns, **_cut(depth, search)}
    options: dict[str, Any] = {"devices": devices}
    if sum_fn is not None and jax.process_count() > 1:
        options |= {"share": (jax.process_index(), jax.process_count()), "sum_fn": sum_fn}
    scores = metrics.retrieval(
        search.embeddings,
        search.labels,
        ks=([k for k in ks if k <= search.candidates] or [1]) if ks else [],
        metric_fns=ranking_fns,
        average=average,
        **search.options,
        **options,
    )
    points, labels = embeddings[search.readable], split.labels[search.readable]
    if clustering_fns:
        scores |= metrics.clustering(
            points,
            labels,
            metric_fns=clustering_fns,
            seeds=seeds,
            starts=starts,
            **kmeans_options,
            **options,
        )
    for name, embedding_fn in embedding_fns.items():
        value = np.asarray(embedding_fn(points, labels))
        if value.ndim or not np.issubdtype(value.dtype, np.number):
            raise ValueError(f"the metric {name} must return one number, not {value!r}")
        scores[name] = float(value)
    if missing := int((~search.readable).sum()):
        scores["unreadable"] = missing
    return scores


def cut_names(depth: int | str | None) -> tuple[str, ...]:
    """Returns the names of the scores whose rankings are cut at `depth`."""
    return () if depth is None else (f"mAP@{depth}", f"MRR@{depth}")


def _cut(depth: int | str, search: Search) -> dict[str, Callable]:
    """Returns the functions of ranks that cut at `depth`, by their names."""
    k = depth
    if isinstance(k, str):
        counts = np.bincount(search.item_labels, minlength=search.labels.max(initial=0) + 1)
        k = max(1, int(counts[search.labels].max(initial=0)) - search.within)
    functions = (metrics.map_at_k, metrics.reciprocal_rank_at_k)
    cut = (functools.partial(function, k=k) for function in functions)
    return dict(zip(cut_names(depth), cut, strict=True))


def prefix_name(dim: int) -> str:
    """Returns the name of the scores of a prefix, as in 'prefix_64/R@1'."""
    return f"prefix_{dim}"


class Evaluation(NamedTuple):
    """Scores of all splits, named 'test/R@1', and the embeddings of test and held-out images.

    The embeddings of the test split are by name: the main ones and the parts.
    """

    scores: dict[str, float]
    test_embeddings: dict[str, np.ndarray] | None
    val_embeddings: np.ndarray | None = None

    def of_split(self, split: str) -> dict[str, float]:
        """Returns the scores of a split, named 'R@1'."""
        prefix = f"{split}/"
        scores = self.scores.items()
        return {k.removeprefix(prefix): v for k, v in scores if k.startswith(prefix)}

    @property
    def test_scores(self) -> dict[str, float]:
        return self.of_split("test")


class Evaluator:
    """Embeds and scores splits with the options of a run; compiles the embedding function once.

    With `interrupts`, a signal ends embedding and scoring early, inside of `interrupts.stoppable`.
    """

    def __init__(self, run: Run, *, interrupts: Interrupts | None = None):
        self._run, self._interrupts = run, interrupts
        self._score = functools.partial(
            score,
            average=run.options.evaluate.average,
            sum_fn=hosts.summed if interrupts is None else interrupts.summed,
        )
        self._inspect = run.method.inspect or Inspect()
        self._skipped: collections.Counter[str] = collections.Counter()
        # Decoded images by the `id` of their split: splits do not compare by content.
        cached = run.splits.values() if run.options.runtime.cache else ()
        self._caches: dict[int, dict[int, np.ndarray]] = {id(split): {} for split in cached}

        def embed_fn(params, model_state, images):
            images = run.normalize_fn(images)
            embeddings = {MAIN: run.method.embed(params, model_state, images)}
            if self._inspect.parts is not None:
                embeddings |= self._inspect.parts(params, model_state, images)
            return embeddings

        self._embed_fn = jax.jit(embed_fn, out_shardings=run.shards.rows)

    def evaluate(self, state: TrainState, *, clustering: bool = True) -> Evaluation:
        """Computes the scores of the test split and of the held-out classes."""
        scores: dict[str, float] = {}
        by_split: dict[str, dict[str, np.ndarray]] = {}
        for name in ("test", "val"):
            split = self._run.splits.get(name)
            if split is None or not len(split):
                continue
            by_split[name] = embeddings = self.embeddings(state, split)
            values = self.scores(state, embeddings, split, clustering=clustering)
            scores |= {f"{name}/{k}": v for k, v in values.items()}
        return Evaluation(scores, by_split.get("test"), by_split.get("val", {}).get(MAIN))

    def embeddings(self, state: TrainState, split: Split) -> dict[str, np.ndarray]:
        """Embeds every image: the main embedding under `MAIN`, parts under their names."""
        features.compute_of_run(self._run, state)
        variables = optimizers.averaged(state.params, state.opt_state), state.model_state
        return self._embed(functools.partial(self._embed_fn, *variables), split)

    def frozen_fn(self, backbone: Mapping[str, Any]) -> Callable[[Split], np.ndarray]:
        """Returns a function that computes the pooled features of a split as unit vectors.

        The net has the variables `backbone`. Its features are those that the head takes, where it
        takes pooled ones.
        """
        run = self._run
        variables = jax.device_put(with_backbone({}, {}, backbone), run.shards.everywhere)
        features_fn = features.features_fn(run, variables, output=run.pooled_output or "pooled")
        to_unit = jax.jit(ops.normalize)
        return functools.partial(self._embed, lambda images: to_unit(features_fn(images)))

    def synthetic_features(
        self, state: TrainState, split: Split, *, key: jax.Array
    ) -> dict[str, np.ndarray]:
        """Computes `Inspect.synthetic_features`; every batch draws its own samples."""
        variables = optimizers.averaged(state.params, state.opt_state), state.model_state
        numbers = itertools.count()

        @jax.jit
        def features_fn(variables, images, key):
            real = self._run.normalize_fn(with_rows(images, self._run.options.evaluate.batch_size))
            features = self._inspect.synthetic_features(*variables, real, key=key)
            return jax.tree.map(lambda rows: with_rows(rows, len(images)), features)

        return self._embed(
            lambda images: features_fn(variables, images, jax.random.fold_in(key, next(numbers))),
            split,
        )

    def pixel_scores(self) -> dict[str, float] | None:
        """Computes scores of the raw test pixels, as a baseline; None if it is too large."""
        split = self._run.test
        if self._run.cache is not None:
            return None
        size = int(np.prod(self._run.eval_image_shape))
        if size > _MAX_PIXELS or len(split) > _MAX_PIXEL_IMAGES:
            return None
        pixels = self._embed(lambda images: images.reshape(len(images), -1), split)
        return self._score(pixels, split, ks=(1,), clustering_fns={})

    def scores(
        self,
        state: TrainState,
        embeddings: dict[str, np.ndarray],
        split: Split,
        *,
        clustering: bool = True,
    ) -> dict[str, float]:
        """Computes all scores of these embeddings that the config asks for."""
        options = self._run.options.evaluate
        main = embeddings[MAIN]
        scores = self.main_scores(main, split, clustering=clustering)
        scores |= self._part_scores(embeddings, split)
        others = {prefix_name(d): vectors.prefix(main, d) for d in self._run.method.prefixes}
        if "refined" in options.rankings:
            assert self._inspect.refine is not None
            variables = optimizers.averaged(state.params, state.opt_state), state.model_state
            masks = {"query": split.query, "gallery": split.gallery}
            others["refined"] = np.asarray(self._inspect.refine(*variables, main, **masks))
        asked = self._run.metrics
        for name, x in others.items():
            values = self._score(
                x, split, ks=asked.ks, ranking_fns=asked.ranking_fns, clustering_fns={}
            )
            scores |= {f"{name}/{k}": v for k, v in values.items()}
        if "mean_distance" in options.rankings:
            parts = {name: x for name, x in embeddings.items() if name != MAIN}
            scores |= self.mean_distance_scores(parts, split)
        if options.knn and set(split.names) & set(self._run.train.names):
            scores["knn"] = self._knn(state, main, split)
        return scores

    def main_scores(
        self, embeddings: np.ndarray, split: Split, *, clustering: bool = True
    ) -> dict[str, float]:
        """Computes the scores of the vectors alone, which need neither the net nor its parts."""
        options, run_metrics = self._run.options.evaluate, self._run.metrics._asdict()
        if not clustering:
            run_metrics["clustering_fns"] = {}
        of_kmeans: dict[str, Any] = {}
        if (kmeans := options.clustering) is not None:
            of_kmeans = {"seeds": kmeans.seeds, "starts": kmeans.starts}
            if kmeans.name == "scikit_learn":
                of_kmeans["kmeans_options"] = metrics.SCIKIT_LEARN_KMEANS
        devices = self._run.shards.mesh.local_devices
        of_kmeans |= {"depth": options.depth, "devices": devices}
        return self._score(embeddings, split, **run_metrics, **of_kmeans)

    def mean_distance_scores(self, parts: Mapping[str, np.ndarray], split: Split) -> dict:
        """Computes scores of the parts {name: [n d]} by `retrieval.mean_distance_ranks`.

        They are named 'mean_distance/R@1'. Images that could not be read are left out.
        """
        search = split.search(np.stack(list(parts.values()), axis=1))  # [n m d]
        score_fns: dict[str, Callable] = {
            f"R@{k}": functools.partial(metrics.recall_at_k, k=k)
            for k in self._run.metrics.ks
            if k <= search.candidates
        }
        score_fns |= self._run.metrics.ranking_fns
        blocks = retrieval.mean_distance_ranks(search.embeddings, search.labels, **search.options)
        values = values_of_queries(blocks, search.labels, score_fns)
        average = functools.partial(metrics.average, over=self._run.options.evaluate.average)
        return {f"mean_distance/{k}": average(v, search.labels) for k, v in values.items()}

    def _part_scores(self, embeddings: dict[str, np.ndarray], split: Split) -> dict[str, float]:
        """Computes R@K of every part, such as a learner of an ensemble, and the mean over parts."""
        ks = self._run.metrics.ks or (1,)
        scores, sums = {}, collections.defaultdict[str, list[float]](list)
        for name in [x for x in embeddings if x != MAIN]:
            values = self._score(embeddings[name], split, ks=ks, ranking_fns={}, clustering_fns={})
            for k, value in values.items():
                if k.startswith("R@"):
                    scores[f"{name}/{k}"] = value
                    sums[k].append(value)
        means = {f"{MEAN}/{k}": float(np.mean(x)) for k, x in sums.items() if len(x) > 1}
        return scores | means

    def _embed(self, embed_fn: Callable, split: Split) -> Any:
        return embed(
            embed_fn,
            split,
            transform_fn=self._run.eval_transform_fn,
            batch_size=self._run.options.evaluate.batch_size,
            shards=self._run.shards,
            cache=self._caches.get(id(split), False),
            workers=self._run.workers(split),
            unreadable=self._run.options.unreadable,
            skipped=self._skipped,
            interrupts=self._interrupts,
        )

    def _knn(self, state: TrainState, embeddings: np.ndarray, split: Split) -> float:
        """Computes the fraction of queries whose k nearest training images vote for their class.

        The nearest breaks ties. Classes are matched by name.
        """
        train = self._run.train
        label_of = {name: label for label, name in enumerate(split.names)}
        # Below 0, a class that only the training split has.
        codes = [label_of.get(name, ~label) for label, name in enumerate(train.names)]
        labels = np.array(codes, np.int32)[train.labels]
        gallery = self.embeddings(state, train)[MAIN]
        queries, items = (np.isfinite(x).all(axis=1) for x in (embeddings, gallery))
        k = self._run.options.evaluate.knn
        near, _ = retrieval.nearest(embeddings[queries], gallery[items], k=k)
        votes = labels[items][near]
        same = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)
        winner = votes[np.arange(len(votes)), np.argmax(same, axis=1)]  # the first most frequent
        return float(np.mean(winner == split.labels[queries]))
