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
import functools
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
    """Peak memory of a step beyond what the process holds before it, its processor time, and the
    loss that it returns."""
    before = rss("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        value = step_fn()
        seconds.append(time.process_time() - start)
    peak = rss("VmHWM") - before
    return {"peak": peak, "seconds": float(np.median(seconds)), "value": float(value)}


def ours(name: str, b: int, tile: int | None, rounds: int) -> dict:
    import jax

    from dmljax import losses

    loss_fn = getattr(losses, name)
    if tile is not None:
        loss_fn = functools.partial(loss_fn, tile=tile)
    x, second = inputs(name, b)
    argnums = (0, 1) if name in VIEWS else 0
    step = jax.jit(jax.value_and_grad(loss_fn, argnums)).lower(x, second).compile()
    cell = {"temporaries": step.memory_analysis().temp_size_in_bytes}
    if rounds:
        arguments = jax.device_put((x, second))
        cell |= measured(lambda: jax.block_until_ready(step(*arguments))[0], rounds)
    return cell


def torchs(name: str, b: int, tile: int | None, rounds: int) -> dict:
    import torch

    torch.set_num_threads(1)
    if b > _WARM_UP:
        torchs(name, _WARM_UP, tile, rounds=1)
    step = torch_loss(name, *inputs(name, b), tile)
    return measured(step, rounds)


def torch_loss(name: str, x: np.ndarray, second: np.ndarray, tile: int | None, device="cpu"):
    """A function that computes the loss and its gradient, and returns the loss."""
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    b, infinity = len(x), torch.tensor(torch.inf, device=device)
    x, second = (torch.tensor(array, device=device) for array in (x, second))
    x.requires_grad_()
    if name in VIEWS:
        second.requires_grad_()

    def soft_maximum(terms, mask):
        return torch.where(mask, terms, -infinity).logsumexp(1)

    def clip(x, y, rows):
        sides = [
            functional.cross_entropy(a[rows] @ other.T / 0.07, rows, reduction="sum") / 2
            for a, other in ((x, y), (y, x))
        ]
        return [(sum(sides), len(rows))]

    def siglip(x, y, rows):
        logits = 10 * (x[rows] @ y.T) - 10
        matches = rows[:, None] == torch.arange(b, device=device)
        return [(functional.softplus(torch.where(matches, -logits, logits)).sum(), len(rows))]

    def supcon(cosines, positives, negatives):
        logits = cosines / 0.1
        normalizer = soft_maximum(logits, positives | negatives)
        mean = torch.where(positives, logits, 0.0).sum(1) / positives.sum(1)
        return [((normalizer - mean).sum(), len(cosines))]

    def multi_similarity(cosines, positives, negatives):
        terms = ((-2.0, positives), (50.0, negatives))
        sides = [
            functional.softplus(soft_maximum(scale * (cosines - 0.5), mask)) / abs(scale)
            for scale, mask in terms
        ]
        return [(sum(sides).sum(), len(cosines))]

    def ntxent(cosines, positives, negatives):
        logits = cosines / 0.07
        others = soft_maximum(logits, negatives)[:, None]
        entries = functional.softplus(others - logits)
        return [(torch.where(positives, entries, 0.0).sum(), positives.sum())]

    def contrastive(cosines, positives, negatives):
        distances = torch.sqrt((2 - 2 * cosines).clamp(min=1e-12))
        sides = []
        for mask, entries in ((positives, distances), (negatives, functional.relu(1 - distances))):
            sides.append((torch.where(mask, entries, 0.0).sum(), (mask & (entries > 0)).sum()))
        return sides

    def circle(cosines, positives, negatives):
        constants = cosines.detach()
        pull = -80 * functional.relu(1.4 - constants) * (cosines - 0.6)
        push = 80 * functional.relu(constants + 0.4) * (cosines - 0.4)
        both = soft_maximum(pull, positives) + soft_maximum(push, negatives)
        return [(functional.softplus(both).sum(), len(cosines))]

    def soft_ranks(cosines, positives, ranked):
        """Of each positive of a row: how many of `ranked` are ahead of it, [rows positives]."""
        columns = positives.nonzero()[:, 1].view(len(cosines), -1)
        ranks = []
        for column in columns.T:
            ahead = torch.sigmoid((cosines - cosines.gather(1, column[:, None])) / 0.01)
            counted = ranked.scatter(1, column[:, None], False)
            ranks.append(1 + torch.where(counted, ahead, 0.0).sum(1))
        return torch.stack(ranks, dim=1)

    def recall_at_k(cosines, positives, negatives):
        ranks = soft_ranks(cosines, positives, positives | negatives)
        recalls = []
        for k in (1, 2, 4, 8, 16):
            within = torch.sigmoid(k - ranks).sum(1)
            recalls.append(within.clamp(max=k) / min(k, ranks.shape[1]))
        return [((1 - torch.stack(recalls).mean(0)).sum(), len(cosines))]

    def smooth_ap(cosines, positives, negatives):
        positives = ~negatives  # with the anchor itself
        among = soft_ranks(cosines, positives, positives)
        ranks = soft_ranks(cosines, positives, torch.ones_like(positives))
        return [((1 - (among / ranks).mean(1)).sum(), len(cosines))]

    forms = {f.__name__: f for f in (clip, siglip, supcon, multi_similarity, ntxent, contrastive)}
    forms |= {f.__name__: f for f in (circle, recall_at_k, smooth_ap)}

    def parts(x, second, rows):
        """(total, count) of some rows, for each mean that the loss adds up."""
        if name in VIEWS:
            return forms[name](x, second, rows)
        same = second[rows][:, None] == second
        others = rows[:, None] != torch.arange(b, device=device)
        return forms[name](x[rows] @ x.T, same & others, ~same)

    def step() -> float:
        x.grad = second.grad = None
        unit = functional.normalize(x)
        other = functional.normalize(second) if name in VIEWS else second
        all_rows = torch.arange(b, device=device)
        if tile is None:
            sides = [parts(unit, other, all_rows)]
        else:
            sides = [
                checkpoint(parts, unit, other, rows, use_reentrant=False)
                for rows in all_rows.split(tile)
            ]
        means = zip(*sides, strict=True)
        value = sum(sum(t for t, _ in mean) / max(sum(c for _, c in mean), 1) for mean in means)
        value.backward()
        return value.item()

    return step


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
                if form.startswith("torch") and not (has_torch and rounds):
                    continue
                result = cell(form, name, b, args.tile, rounds)
                print(f"| {b:,} | {name} | {form} | {words(result)} |", flush=True)
                values += [result["value"]] if result and "value" in result else []
            assert np.ptp(values or [0]) <= 1e-3 * max(map(abs, values or [1])), values


if __name__ == "__main__":
    main()
