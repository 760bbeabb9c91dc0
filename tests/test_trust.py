"""No file that is read may name code to import, unless --trust-modules is given."""

import ast
import inspect
import json
import pathlib
import pickle
import shutil
import sys

import forged
import numpy as np
import pytest
import safetensors.numpy
from system import tiny

import dmljax
from dmljax import main
from dmljax.bundle import exporting, models
from dmljax.config import build, fields, registry
from dmljax.config import files as config_files
from dmljax.files import reading
from dmljax.runs import folder as run_folder
from dmljax.runs import training
from dmljax.studies import study_file
from dmljax.studies.executor import Executor
from dmljax.studies.folder import StudyFolder
from studies import study_files

ROOT = pathlib.Path(__file__).parents[1]
OWN = {
    "dataset": {"name": "config.outside:my_dataset", "classes": 8},
    "net": {"name": "config.outside:my_net", "width": 6},
    "loss": {"name": "config.outside:my_loss", "weight": 2.0},
    "normalize": "config.outside:my_normalization",
}
REFUSAL = (
    r"(config|manifest).json names '.*', and importing .* runs its code: .* add --trust-modules"
)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run with functions of a module of its user."""
    folder = tmp_path_factory.mktemp("own")
    evaluate = {"every": 2, "ks": [1], "batch_size": 16, "clustering": None}
    config = tiny(folder, steps=2, evaluate=evaluate, runtime={"devices": 1}, **OWN)
    training.run(config, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def own_bundle(own):
    with pytest.raises(ValueError, match=REFUSAL):
        main.main(["export", str(own), f"--out={own.parent}/own.bundle"])
    return exporting.export(own, own.parent / "own.bundle", batch_sizes=(1, 4), trust_modules=True)


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """The name of a function in a module that leaves a mark where it is imported."""
    mark = tmp_path / "PWNED"
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nrun = dict\n"
    (tmp_path / "evil_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "evil_module:run"
    assert not mark.exists() and "evil_module" not in sys.modules


PLACES = {
    "dataset": lambda name: {"dataset": {"name": name, "args": ["touch", "PWNED"]}},
    "sampler": lambda name: {"sampler": name},
    "transform": lambda name: {"transform": name},
    "eval_transform": lambda name: {"eval_transform": name},
    "normalization": lambda name: {"normalize": name},
    "net": lambda name: {"net": name},
    "method": lambda name: {"method": name},
    "loss": lambda name: {"loss": name},
    "miner": lambda name: {"miner": name},
    "value": lambda name: {"loss": {"name": "arcface", "margin": name}},
    "adaptation": lambda name: {"trained": name},
    "optimizer": lambda name: {"optimizer": {"name": name, "rate": 0.1}},
    "schedule": lambda name: {"schedule": {"name": name}},
    "metric": lambda name: {"evaluate": {"metrics": [name]}},
    "call": lambda name: {"evaluate": {"call": name}},
}


def test_every_kind_of_function_is_tried():
    places = set(PLACES) - {"call", "eval_transform"}
    assert places == set(registry.KINDS)


@pytest.mark.parametrize("keyword", registry.ARGUMENTS)
def test_a_keyword_names_no_module(keyword, evil):
    """In every function that has it."""
    owners = [
        (kind, name)
        for kind in (*registry.KINDS, *registry.ARGUMENTS)
        for name, function in registry.table(kind).items()
        if keyword in inspect.signature(function).parameters
    ]
    assert owners
    for kind, name in owners:
        for value in (evil, {"name": evil}):
            spec = reading.marked({"name": name, keyword: value}, "config.json")
            with pytest.raises(ValueError, match=REFUSAL):
                registry.resolve(kind, spec)


@pytest.mark.parametrize("place", PLACES)
def test_a_config_of_a_folder_names_no_module(place, tmp_path, evil):
    """In each place, but a command line may put a name of the user into the same place."""
    config = tiny(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    forged.change_config(tmp_path, PLACES[place](evil))
    with pytest.raises(ValueError, match=REFUSAL) as refused:
        build.build(reading.config_of_run(tmp_path))
    assert "\n" not in str(refused.value) and "evil_module" in str(refused.value)
    with pytest.raises(ValueError, match="'no_module:f' cannot be imported"):
        build.build(config | PLACES[place]("no_module:f"))
    (field,) = PLACES[place](evil)
    typed = config_files.override(
        reading.config_of_run(tmp_path), [f"--config.{field}={PLACES[place]('no_module:f')[field]}"]
    )
    with pytest.raises(ValueError, match="'no_module:f' cannot be imported"):
        build.build(typed)


def test_the_mark_survives_what_happens_to_a_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny(tmp_path, loss="a.b:c", notes="x: y")))
    config = reading.config_of_run(tmp_path)
    for content in (
        fields.complete(config),
        fields.plain(config),
        pickle.loads(pickle.dumps(config)),
        config_files.override(dict(config), ["--config.loss.margin=0.1"]),
    ):
        name = fields.named(content["loss"])["name"]
        assert isinstance(name, reading.FileText) and name == "a.b:c"
        assert name.path == str(tmp_path / "config.json")
    with reading.trusting_modules(True), reading.trusting_modules(False):
        assert type(reading.config_of_run(tmp_path)["loss"]) is str
    assert type(reading.config_of_run(tmp_path)["loss"]) is reading.FileText


def test_public_functions_of_dmljax_may_be_named():
    """As the recipe of ABE does; no other attribute of its modules, and no command."""
    for name, is_allowed in {
        "dmljax.methods.abe:contrastive": True,
        "dmljax.losses.pairs:jnp": False,
        "dmljax.commands.train:run": False,
        "dmljax.data.datasets:npz": False,
        "dmljax:load": False,
    }.items():
        text = reading.marked(name, "config.json")
        if is_allowed:
            assert callable(registry.resolve("loss", text))
        else:
            with pytest.raises(ValueError, match=r"runs its code|not a public function"):
                registry.resolve("loss", text)


def test_a_file_of_weights_names_no_module(tmp_path, evil):
    metadata = {"format": 1, "inputs": {"normalization": evil}, "tensors_sha256": "0" * 64}
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(1)}, path, {"dmljax": json.dumps(metadata)})
    config = tiny(tmp_path, normalize=None)
    config["net"] = {**config["net"], "weights": str(path)}
    with pytest.raises(ValueError, match=r"weights.safetensors names 'evil_module:run'"):
        build.build(config)


def _verbs(run, bundle, out):
    """The commands that read the config of a run or of a bundle, by names."""
    return {
        "evaluate": ["evaluate", run],
        "report": ["report", run],
        "embed": ["embed", run, f"--out={out}/embeddings"],
        "export": ["export", run, f"--out={out}/new.bundle", "--batch-sizes=1"],
        "study join": ["study", "join", run, f"--workdir={out}"],
        "index": [
            *("index", "create", f"{out}/i", f"--bundle={bundle}"),
            *("--split=test", f"--images={out}/images"),
        ],
    }


VERBS = _verbs("", "", "")


def _forged_folders(own, own_bundle, tmp_path, evil, place):
    run = shutil.copytree(own, tmp_path / "run")
    bundle = shutil.copytree(own_bundle, tmp_path / "a.bundle")
    for folder in (run, bundle):
        forged.change_config(folder, PLACES[place](evil))
    return str(run), str(bundle)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_imports_what_a_file_names_only_if_it_is_trusted(
    verb, own, own_bundle, tmp_path, evil
):
    run, bundle = _forged_folders(own, own_bundle, tmp_path, evil, "dataset")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=REFUSAL):
        main.main(_verbs(run, bundle, tmp_path)[verb])
    assert sorted(tmp_path.rglob("*")) == before
    assert main.main([*_verbs(str(own), str(own_bundle), tmp_path)[verb], "--trust-modules"]) == 0


def test_functions_of_python(own, own_bundle, tmp_path, evil):
    run, bundle = _forged_folders(own, own_bundle, tmp_path, evil, "loss")
    for function in (
        lambda: dmljax.load(run),
        lambda: dmljax.bundle.export(run, tmp_path / "new.bundle"),
        lambda: models.open_model(pathlib.Path(bundle)),
        lambda: run_folder.evaluate(run),
    ):
        with pytest.raises(ValueError, match=REFUSAL):
            function()
    with pytest.raises(ValueError, match=REFUSAL):
        dmljax.load(own)
    embed_fn, variables, _ = dmljax.load(own, trust_modules=True)
    assert embed_fn(variables, np.zeros((2, 6, 6, 3), np.uint8)).shape == (2, 4)
    # Loading and checking a bundle, as a service does, reads its config and imports nothing.
    assert dmljax.bundle.load(bundle).check()
    assert main.main(["bundle", "check", bundle]) == 0


def test_a_run_that_starts_from_another_one(own, tmp_path, evil):
    """Its normalization is taken over, and is text of that run."""
    run = shutil.copytree(own, tmp_path / "run")
    config = tiny(tmp_path, steps=2, **OWN) | {"start": str(run), "normalize": None}
    with pytest.raises(ValueError, match=REFUSAL):
        training.run(config, tmp_path / "new")
    forged.change_config(run, {"normalize": evil})
    path = tmp_path / "evil_start.py"
    path.write_text(f"def get_config():\n    return {config!r}\n")
    words = ["train", f"--config={path}", f"--workdir={tmp_path}/new"]
    with pytest.raises(ValueError, match=REFUSAL):
        main.main(words)
    forged.change_config(run, {"normalize": OWN["normalize"]})
    assert main.main([*words, "--trust-modules", "--config.runtime.devices=1"]) == 0
    # What the user has typed needs no trust: the same run goes on.
    assert training.run(config | {"normalize": OWN["normalize"]}, tmp_path / "typed")


def test_the_index_of_a_study_starts_no_code(tmp_path, evil):
    """Runs are planned from the study file alone; the index only shows them."""
    path = study_files.write_study(tmp_path)
    executor = Executor(study_file.read(str(path)), StudyFolder(tmp_path / "study"))
    executor.folder.record(executor.study, executor.plan())
    file = tmp_path / "study" / "index.json"
    index = json.loads(file.read_text())
    run = {"row": "plain", "seed": 0, "fold": None, "digest": "0" * 12, "after": []}
    run |= {"config": "evil.py", "flags": ["--config.loss='evil_module:run'"]}
    file.write_text(json.dumps(index | {"planned": [run]}))
    assert executor.plan()[0].config == str(tmp_path / "tiny.py")
    assert executor.table().rows[0].finished == 0


def _imports_by_name(tree):
    """The calls that import or run text: `import_module(...)`, `exec(...)` and the like."""
    names = {"import_module", "__import__", "exec", "eval", "compile", "run_module", "run_path"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            is_method = isinstance(function, ast.Attribute) and name == "compile"
            if (name in names and not is_method) or name in ("import_module", "__import__"):
                yield name, node.args[0]
            elif name in ("map", "partial") and any(
                ast.unparse(argument).endswith("import_module") for argument in node.args
            ):
                yield "import_module", node


def _is_fixed(argument):
    """Whether it is a constant, or begins with `dmljax.`."""
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return is_text and (first is argument or first.value.startswith("dmljax."))


def test_only_the_registry_imports_by_name():
    """And config files, which are programs of the user, are run by one function."""
    allowed = {("config/registry.py", "import_module")}
    allowed |= {("config/files.py", "exec"), ("config/files.py", "compile")}
    found = set()
    for path in (ROOT / "dmljax").rglob("*.py"):
        for name, argument in _imports_by_name(ast.parse(path.read_text())):
            if not _is_fixed(argument):
                found.add((str(path.relative_to(ROOT / "dmljax")), name))
    assert found == allowed


def test_the_import_test_sees_imports():
    for code in ("importlib.import_module(name)", "map(importlib.import_module, x)", "exec(text)"):
        assert [not _is_fixed(x) for _, x in _imports_by_name(ast.parse(code))] == [True]
    for code in ("import_module('jax')", "import_module(f'dmljax.{x}')", "re.compile(x)"):
        assert all(_is_fixed(x) for _, x in _imports_by_name(ast.parse(code)))
