"""Every reader of files that strangers may have made, and real files for it.

    python tests/fuzz/readers.py FOLDER SEED NAME=CASES...

A case is a damaged file. The reader must return, or raise an error that the command prints as one
line, and may take at most a stated multiple of the size of the file. A process of its own runs the
cases, since a reader might crash it. Before each case it is written to FOLDER/case.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import resource
import shutil
import signal
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parent)]
for part in ("weights", "studies", "bundle"):
    sys.path.insert(0, str(HERE.parent / part))

SEEDS = HERE / "seeds"  # files that a reader once failed on, in a folder for each reader
_SECONDS = 20  # for one case
_FIXED = 16 << 20  # bytes that a reader may take for any file


class Reader(NamedTuple):
    """`files_fn(folder)` makes real files or folders, and `read_fn(path)` reads one.

    `multiple`: of the size of the file, how much memory Python and numpy may take. The process may
    take 2 GiB.
    """

    files_fn: Callable[[pathlib.Path], None]
    read_fn: Callable[[pathlib.Path], object]
    multiple: int = 8


def _tensors():
    x = np.linspace(0, 1, 30, dtype=np.float32).reshape(5, 6)
    return {"conv1.weight": x, "bn1.running_mean": x[0].copy()}


def _weights(folder):
    import safetensors.numpy
    import weight_files as make

    tensors = _tensors()
    files = {
        "zip.pth": make.torch_file(tensors, legacy=False),
        "legacy.pth": make.torch_file(tensors, legacy=True),
        "a.safetensors": safetensors.numpy.save(tensors, {"dmljax": json.dumps({"net": "lecun"})}),
        "old.caffemodel": make.caffe({"a": [tensors["conv1.weight"]]}, old=True),
        "new.caffemodel": make.caffe({"a": [tensors["conv1.weight"]]}, old=False),
        "a.onnx": make.onnx(tensors),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _read_weights(path):
    from dmljax.weights import converted, readers

    readers.read(path)
    with contextlib.suppress(ValueError):  # a file that was not converted by dmljax
        converted.read_metadata(path)


def _images(folder):
    from PIL import Image

    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
    for name, options in (
        ("a.jpg", {}),
        ("b.jpg", {"progressive": True}),
        ("c.jpg", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"}),
        ("a.png", {}),
        ("a.gif", {}),
        ("a.bmp", {}),
        ("a.webp", {}),
        ("a.tiff", {"compression": "tiff_lzw"}),
        ("a.ppm", {}),
    ):
        image.save(folder / name, **options)
    image.quantize(16).save(folder / "p.png", transparency=3)
    Image.fromarray(rng.integers(0, 2**16, (8, 8)).astype(np.uint16)).save(folder / "i.png")


def _read_image(path):
    from dmljax.data import decode

    decode.read(str(path), least_side=8)


def _index(folder):
    from dmljax import index

    with index.create(folder / "a.index", model="ab" * 32, dimension=4) as store:
        vectors = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        store.add([f"i{i}" for i in range(40)], vectors, [{"n": i} for i in range(40)])
        store.compact()


def _read_index(path):
    from dmljax import index

    with index.open(path) as store:
        query = np.eye(4, dtype=np.float32)[:1]
        store.search(query, 3, where={"n": {"<": 9}})
        store.search(query, 3)
        store.get(["i1"])
        store.facts()
        store.check()
        for _ in store.scan():
            pass


def _results(folder):
    from study_files import finished

    from dmljax.files import run_folder as result

    evaluations = [result.Evaluated(step, {"test/R@1": 0.5}) for step in (3, 6)]
    result.write(folder, finished({"test/R@1": 0.5}, "ab", evaluations=evaluations))


def _read_result(path):
    from dmljax.files import reading
    from dmljax.files import run_folder as result
    from dmljax.studies import outcomes

    run = path.parent / "read"
    run.mkdir(exist_ok=True)
    for name in ("result.json", "config.json", "metrics.jsonl", "ladder.json"):
        shutil.copy(path, run / name)
    reading.json_lines(run / "metrics.jsonl")
    with contextlib.suppress(ValueError):
        reading.config_of_run(run)
    with contextlib.suppress(ValueError):
        reading.chosen_run(run)
    outcomes.outcome(run)
    result.read(run)


def _studies(folder):
    from dmljax.studies.folder import StudyFolder
    from dmljax.studies.plan import PlannedRun
    from dmljax.studies.study_file import Row, Study

    study = Study("small", "small.py", "ab", (Row("plain", "tiny.py", {}),), seeds=(0, 1))
    runs = [PlannedRun("plain", seed, None, "tiny.py", (), f"digest{seed}") for seed in range(2)]
    StudyFolder(folder / "study", folder / "runs").record(study, runs)


def _read_study(path):
    from dmljax.studies.folder import StudyFolder
    from dmljax.studies.study_file import Row, Study

    folder = StudyFolder(path)
    study = Study("small", "small.py", "ab", (Row("plain", "tiny.py", {}),))
    folder.record(study, folder.planned())


def _adapters(folder):
    shutil.copytree(HERE.parent / "weights" / "peft" / "vit", folder / "vit")
    (folder / "vit" / "expected.safetensors").unlink()


def _read_adapter(path):
    from test_peft import NETS

    from dmljax.config import registry
    from dmljax.weights import peft

    peft.load_adapter(path, registry.resolve("net", NETS["vit"])())


def _bundles(folder):
    import bundle_cases

    run = bundle_cases.trained(folder)
    bundle_cases.exported(run, folder / "a.bundle")
    for path in folder.iterdir():
        if path.name != "a.bundle":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _read_bundle(path):
    import forged

    from dmljax import bundle
    from dmljax.files.writing import sha256

    with contextlib.suppress(Exception):
        # What lies behind the digests is read, except for programs: their readers are native
        # libraries, and may crash (docs/ship.md).
        program = json.loads((path / "manifest.json").read_text())["files"]["embed.jaxexport"]
        if sha256(path / "embed.jaxexport") == program:
            forged.renew(path)
    bundle.load(path).embed([np.zeros((12, 12, 3), np.uint8)])


READERS = {
    "images": Reader(_images, _read_image, multiple=10**6),
    "weights": Reader(_weights, _read_weights),
    "index": Reader(_index, _read_index),
    "result": Reader(_results, _read_result),
    "study": Reader(_studies, _read_study),
    "adapter": Reader(_adapters, _read_adapter),
    "bundle": Reader(_bundles, _read_bundle),
}


def cases(name: str, folder: pathlib.Path, seed: int) -> Iterator[pathlib.Path]:
    """Damaged forms of the real files, one after another at the same path; kept seeds first."""
    import mutations

    originals, rng = folder / "originals", np.random.default_rng([seed, len(name)])
    originals.mkdir()
    READERS[name].files_fn(originals)
    roots = sorted(originals.iterdir())
    files = {path: path.read_bytes() for path in sorted(originals.rglob("*")) if path.is_file()}
    small = [data for data in files.values() if len(data) < 2**16]
    case = folder / "case"
    kept = sorted((SEEDS / name).iterdir()) if (SEEDS / name).is_dir() else []
    for path in (*roots, *kept):
        yield _put(path, case)
    while True:
        root = roots[rng.integers(len(roots))]
        inside = [path for path in files if path == root or root in path.parents]
        chosen = inside[rng.integers(len(inside))]
        target = case if chosen == root else case / chosen.relative_to(root)
        _put(root, case)
        target.write_bytes(mutations.damaged(files[chosen], small, rng))
        yield case


def _put(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return target


def _size(path: pathlib.Path) -> int:
    paths = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in paths if file.is_file())


def check(reader: Reader, path: pathlib.Path) -> tuple[bool, str | None]:
    """Whether a case is read, and how the reader failed; None if it did what it should."""
    limit = reader.multiple * _size(path) + _FIXED
    signal.alarm(_SECONDS)
    tracemalloc.start()
    is_read = False
    try:
        reader.read_fn(path)
        is_read = True
    except (ValueError, OSError, FloatingPointError) as error:
        text = str(error)
        if not text.strip() or "\n" in text or len(text) > 8000:
            return False, f"no error of one line: {type(error).__name__}: {text[:300]!r}"
    except BaseException:
        return False, traceback.format_exc()
    finally:
        signal.alarm(0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if peak > limit:
        return is_read, f"{peak:,} bytes of memory for a file of {_size(path):,}"
    return is_read, None


def main() -> None:
    folder, seed, *readers = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    failures = 0
    for name, count in (reader.split("=") for reader in readers):
        place = pathlib.Path(folder) / name
        place.mkdir(parents=True)
        end, number, read = time.monotonic() + 60 if count == "minute" else 0, 0, 0
        for path in cases(name, place, int(seed)):
            originals = len(list((place / "originals").iterdir()))
            (place / "number").write_text(str(number))
            if number < originals:  # imports what it needs
                READERS[name].read_fn(path)
            is_read, problem = check(READERS[name], path)
            if number < originals and not is_read:
                problem = problem or "the file is not damaged, and it is not read"
            number, read = number + 1, read + is_read
            if problem:
                failures += 1
                kept = place / f"failure-{number}"
                _put(path, kept)
                print(f"{kept}: {problem}")
            if (time.monotonic() > end) if count == "minute" else number >= int(count):
                break
        print(f"{name}: {number} cases, {read} of them were read")
    # Not `getrusage`, which also counts the process that started this one.
    status = pathlib.Path("/proc/self/status").read_text()
    rss = int(status.split("VmHWM:")[1].split()[0]) >> 10
    print(f"{rss} MiB")
    sys.exit(bool(failures) or rss > 2048)


if __name__ == "__main__":
    main()
