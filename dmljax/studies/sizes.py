"""The columns `parameters` and `flops` of a study: the size of the net of every row.

Both are counted in the traced program of the embedding, without training and without a device. A
process of its own does it, since a worker holds no device: `dmljax study sizes FILE`.
"""

import os
from collections.abc import Mapping
from typing import Any

from dmljax.files import reading
from dmljax.studies import plan
from dmljax.studies.folder import Session
from dmljax.studies.study_file import Study
from dmljax.studies.worker import run_verb

_FILE = "sizes.json"
Sizes = dict[str, dict[str, int]]  # row -> column -> number


def of_config(config: Mapping[str, Any]) -> dict[str, int]:
    """The parameters that the embedding of a config reads, and its multiply-adds for one image."""
    import jax
    import numpy as np

    from dmljax.config import build
    from dmljax.train.compilation import multiply_adds

    # Neither the files of a run nor its first values change a size.
    net = {k: v for k, v in plan.fields.named(config["net"]).items() if k != "weights"}
    plain = {"normalize": "imagenet", "start": None, "trained": "all", "distill": 0.0, "net": net}
    method, _ = build.embedding({**config, **plain}, classes=2)
    shape = _image_shape(config)
    images = jax.ShapeDtypeStruct((2, *shape), np.float32)
    batch = {"images": images, "labels": jax.ShapeDtypeStruct((2,), np.int32)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, model_state = jax.eval_shape(method.init, key, batch)
    one = jax.ShapeDtypeStruct((1, *shape), np.float32)
    leaves = jax.tree.leaves(params)
    jaxpr = jax.make_jaxpr(method.embed)(params, model_state, one).jaxpr
    read_variables = {id(v) for equation in jaxpr.eqns for v in equation.invars}
    inputs = zip(leaves, jaxpr.invars, strict=False)
    count = sum(leaf.size for leaf, variable in inputs if id(variable) in read_variables)
    return {"parameters": count, "flops": multiply_adds(jaxpr)}


def _image_shape(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a test image: of the transform, or if it keeps sizes, of the data set."""
    import numpy as np

    from dmljax.config import registry
    from dmljax.data import batches
    from dmljax.data.reader import Reader
    from dmljax.data.transforms import transform

    chosen = registry.resolve("transform", config["eval_transform"])
    transform_fn = transform.bind(chosen.func, **chosen.keywords)
    shapes = {
        transform_fn(np.zeros((*size, 3), np.uint8), np.random.default_rng(0)).shape
        for size in ((256, 256), (320, 280))
    }
    if len(shapes) == 1:
        return shapes.pop()
    dataset = plan.fields.named(config["dataset"])
    dataset = {k: v for k, v in dataset.items() if k not in plan.OTHER_FIELDS["dataset"]}
    train = registry.resolve("dataset", dataset)().train
    return batches.image_shape(Reader(train, cache=False), transform_fn, skip=True)


def of_study(study: Study) -> Sizes:
    """The sizes of all rows, except of rows whose config a search decides."""
    configs = plan.check_rows(study)
    sizes = {name: of_config(config) for name, config in configs.items()}
    for row in study.rows:
        if row.runs_of in sizes:
            nets = row.join_seeds or (study.folds or 1 if row.join_folds else 1)
            sizes[row.name] = {key: nets * value for key, value in sizes[row.runs_of].items()}
    return {row.name: sizes[row.name] for row in study.rows if row.name in sizes}


def ensure(session: Session) -> None:
    """Writes `sizes.json` into the folder of a study, unless it exists for these rows."""
    path = session.folder.path / _FILE
    if read(session):
        return
    words = ("sizes", session.study.source, f"--out={path}")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if message := run_verb(session, *words, environment=environment):
        raise ValueError(f"columns: the sizes cannot be counted: {message}")


def read(session: Session) -> Sizes:
    """The sizes of all rows; nothing if they were not counted, or counted for other rows."""
    try:
        content = reading.json_value((session.folder.path / _FILE).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content["sizes"] if content["digest"] == session.study.digest else {}
