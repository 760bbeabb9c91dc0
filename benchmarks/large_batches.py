"""Memory and time of pair losses of large batches: at once, in tiles, and beside torch.

    python benchmarks/large_batches.py [--losses clip supcon] [--batch 4096 32768] [--run 4096]

Value and gradient for float32 embeddings of 128 dimensions, 4 rows of each class. Every cell is a
process of its own. "temporaries" is XLA's analysis of the compiled program, "peak" what the memory
of the process grew by while it ran, embeddings and gradients included. "s" is processor time,
summed over all cores, the median of the rounds; torch computes in one thread, because its threads
spin while they wait. Batches above --run are only compiled.

"at once" stores the matrix of pairs. "chunks" of torch are blocks of --tile rows against all
columns, each of which is computed again for the gradient (`torch.utils.checkpoint`). Where torch
has an environment of its own, its interpreter runs this with the folder of jax's packages in
PYTHONPATH. Without torch, its rows are left out.
"""

import argparse
import importlib.util
import json
import pathlib
import resource
import subprocess
import sys
import time

import numpy as np

DIM, PER_CLASS = 128, 4
VIEWS = ("clip", "siglip")
LOSSES = (*VIEWS, "ntxent", "supcon", "multi_similarity", "contrastive", "circle")
LOSSES += ("recall_at_k", "smooth_ap")
IN_TORCH = ("clip", "siglip", "supcon", "multi_similarity")
_WARM_UP = 64  # rows of a first step, so that the peak has no pages of torch's code
FORMS = ("dmljax at once", "dmljax in tiles", "torch at once", "torch in chunks")


def inputs(name: str, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings, and the labels or the other view."""
    rng = np.random.default_rng(0)
    labels = np.arange(b) // PER_CLASS
    x = rng.normal(size=(b, DIM)) + rng.normal(size=(b // PER_CLASS, DIM))[labels]
    other = x + rng.normal(size=x.shape)
    return x.astype(np.float32), other.astype(np.float32) if name in VIEWS else labels


def rss(field: str) -> int:
    """A size of this process in bytes: VmRSS, or its peak VmHWM."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) << 10


def measured(step_fn, rounds: int) -> dict:
    """Peak memory of a step beyond what the process holds before it, and its processor time."""
    before = rss("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        step_fn()
        seconds.append(time.process_time() - start)
    return {"peak": rss("VmHWM") - before, "seconds": float(np.median(seconds))}


def ours(name: str, b: int, tile: int | None, rounds: int) -> dict:
    import jax

    from dmljax import losses

    loss_fn = getattr(losses, name)
    if tile is not None:
        loss_fn = losses.tiled(loss_fn, tile=tile)
    x, second = inputs(name, b)
    argnums = (0, 1) if name in VIEWS else 0
    step = jax.jit(jax.value_and_grad(loss_fn, argnums)).lower(x, second).compile()
    cell = {"temporaries": step.memory_analysis().temp_size_in_bytes}
    if rounds:
        arguments = jax.device_put((x, second))
        cell |= measured(lambda: jax.block_until_ready(step(*arguments)), rounds)
        cell["value"] = float(step(*arguments)[0])
    return cell


def torchs(name: str, b: int, tile: int | None, rounds: int) -> dict:
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    torch.set_num_threads(1)
    x, second = map(torch.tensor, inputs(name, b))
    x.requires_grad_()
    if name in VIEWS:
        second.requires_grad_()
    infinity = torch.tensor(torch.inf)

    def views(x, y, rows):
        """The sum over rows of clip from one side, or of siglip."""
        matches = rows[:, None] == torch.arange(len(y))
        products = x[rows] @ y.T
        if name == "siglip":
            logits = 10 * products - 10
            return functional.softplus(torch.where(matches, -logits, logits)).sum()
        return functional.cross_entropy(products / 0.07, rows, reduction="sum") / 2

    def pairs(x, labels, rows):
        cosines = x[rows] @ x.T
        others = rows[:, None] != torch.arange(len(x))
        same = labels[rows][:, None] == labels
        positives, negatives = same & others, ~same
        if name == "supcon":
            logits = cosines / 0.1
            normalizer = torch.where(others, logits, -infinity).logsumexp(1)
            mean = torch.where(positives, logits, 0.0).sum(1) / positives.sum(1)
            return (normalizer - mean).sum()

        def soft_maximum(scale, mask):
            terms = torch.where(mask, scale * (cosines - 0.5), -infinity)
            return functional.softplus(terms.logsumexp(1)) / abs(scale)

        return (soft_maximum(-2.0, positives) + soft_maximum(50.0, negatives)).sum()

    def directions(x, second, rows):
        if name not in VIEWS:
            return pairs(x, second, rows)
        backward = views(second, x, rows) if name == "clip" else 0
        return views(x, second, rows) + backward

    def step():
        x.grad = second.grad = None
        unit = functional.normalize(x)
        other = functional.normalize(second) if name in VIEWS else second
        if tile is None:
            total = directions(unit, other, torch.arange(b))
        else:
            total = 0
            for rows in torch.arange(b).split(tile):
                total = total + checkpoint(directions, unit, other, rows, use_reentrant=False)
        (total / b).backward()
        return total / b

    if b > _WARM_UP:
        torchs(name, _WARM_UP, tile, rounds=1)
    return measured(step, rounds) | {"value": step().item()}


def cell(form: str, name: str, b: int, tile: int, rounds: int) -> dict | None:
    """What a process of its own measures; None if it fails, such as for want of memory."""
    task = json.dumps([form, name, b, tile, rounds])
    command = [sys.executable, __file__, f"--cell={task}"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        last_line = (process.stderr.strip().splitlines() or ["killed"])[-1]
        print(f"{form}, {name}, {b}: {last_line}", file=sys.stderr)
        return None
    return json.loads(process.stdout)


def measure_cell(form: str, name: str, b: int, tile: int, rounds: int) -> dict:
    limit = 20 << 30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    function = ours if form.startswith("dmljax") else torchs
    return function(name, b, None if form.endswith("at once") else tile, rounds)


def words(cell: dict | None) -> str:
    """A cell of the table: temporaries and peak in MiB, seconds."""
    if cell is None:
        return "- | - | -"
    sizes = [f"{cell[key] / 2**20:,.0f}" if key in cell else "-" for key in ("temporaries", "peak")]
    return " | ".join([*sizes, f"{cell['seconds']:.2f}" if "seconds" in cell else "-"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[4096, 32768, 65536])
    parser.add_argument("--run", type=int, default=4096, help="larger batches are only compiled")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--tile", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    has_torch = importlib.util.find_spec("torch") is not None
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(measure_cell(*args.cell)))
        return
    print("| batch | loss | form | temporaries, MiB | peak, MiB | s |")
    print(f"|{'---|' * 6}")
    for b in args.batch:
        rounds = args.rounds if b <= args.run else 0
        for name in args.losses:
            values = []
            for form in args.forms:
                in_torch = has_torch and rounds and name in IN_TORCH
                if form.startswith("torch") and not in_torch:
                    continue
                result = cell(form, name, b, args.tile, rounds)
                print(f"| {b:,} | {name} | {form} | {words(result)} |", flush=True)
                values += [result["value"]] if result and "value" in result else []
            assert np.ptp(values or [0]) <= 1e-3 * max(map(abs, values or [1])), values


if __name__ == "__main__":
    main()
