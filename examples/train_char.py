"""A character-level transformer, trained with this package's attention and with torch's own.

From the same seeds the two loss curves lie on each other.

    python examples/train_char.py                       # 200 steps, about a minute on two cores
    python examples/train_char.py --plot curves.svg     # needs matplotlib

The text is what every Python has at hand: the docstrings of its standard library. A third run, in
which torch computes attention by its plain (math) kernels, shows how far two right ways to compute
the same thing part company: that is the noise which the difference has to be measured with.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import flashattn as fa
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

MODULES = "argparse collections contextlib datetime decimal email.message functools heapq"
MODULES += " itertools json logging os pathlib random re socket statistics string subprocess"
MODULES += " tarfile textwrap threading tempfile unittest urllib.request zipfile"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of the model and of its batches."""

    layers: int = 2
    heads: int = 4
    width: int = 128
    context: int = 128  # characters that a row of a batch has
    batch: int = 16


def standard_library_text() -> str:
    """The docstrings of some modules and of what they define."""
    parts = []
    for name in MODULES.split():
        module = importlib.import_module(name)
        parts.append(inspect.getdoc(module) or "")
        for _, member in sorted(vars(module).items()):
            if getattr(member, "__module__", None) == name:
                parts.append(inspect.getdoc(member) or "")
    return "\n\n".join(part for part in parts if part)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(batch, seqlen, heads, dim), causal."""
    out: Tensor = fa.attention(q, k, v, causal=True)
    return out


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by torch, whose layout is (batch, heads, seqlen, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Attention, then a perceptron, each with its normalisation before it."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = sizes.heads, attention
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(2))
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.project = nn.Linear(sizes.width, sizes.width)
        self.up = nn.Linear(sizes.width, 4 * sizes.width)
        self.down = nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) to the same."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.project(self.attention(*qkv.unbind(2)).flatten(2))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return y


class Model(nn.Module):
    """Logits of the next character."""

    def __init__(self, characters: int, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, sizes.width)
        self.place = nn.Parameter(0.02 * torch.randn(sizes.context, sizes.width))
        self.blocks = nn.Sequential(*(Block(sizes, attention) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, context) of int64 to (batch, context, characters)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + self.place)))
        return logits


def train(attention: Attention, steps: int, sizes: Sizes, text: str) -> list[float]:
    """The loss of each step. Initial weights and batches depend on the seed alone."""
    torch.manual_seed(0)
    numbers = {c: n for n, c in enumerate(sorted(set(text)))}
    data = torch.tensor([numbers[c] for c in text])
    model = Model(len(numbers), sizes, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    window = torch.arange(sizes.context + 1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - sizes.context - 1, (sizes.batch, 1))
        rows = data[starts + window]
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def curves(steps: int, sizes: Sizes, text: str) -> dict[str, list[float]]:
    """Losses of this package, of torch, and of torch's plain kernels."""
    found = {}
    for name, attention, plain in (
        ("flashattn", ours, False),
        ("torch", torchs, False),
        ("torch, plain kernels", torchs, True),
    ):
        start = time.perf_counter()
        with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
            found[name] = train(attention, steps, sizes, text)
        seconds = time.perf_counter() - start
        print(f"{name:<22} loss {found[name][0]:.4f} -> {found[name][-1]:.4f} in {seconds:.0f} s")
    return found


def largest_differences(found: dict[str, list[float]]) -> tuple[float, float]:
    """From torch's curve: of this package, and of torch's plain kernels (the noise)."""
    mine, torch_, plain = found.values()
    pairs = ((mine, torch_), (plain, torch_))
    apart = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairs]
    return apart[0], apart[1]


def plot(found: dict[str, list[float]], path: str) -> None:
    """The curves, and below them their distance from torch's."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    matplotlib.rcParams["svg.hashsalt"] = "flashattn"
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    mine, torch_, plain = found.values()
    above.plot(torch_, color="0.6", linewidth=4, label="torch's attention")
    above.plot(mine, color="C0", linewidth=1.2, label="flashattn")
    above.set_ylabel("loss (nats per character)")
    above.legend()
    for losses, label, color in ((plain, "torch, plain kernels", "0.6"), (mine, "flashattn", "C0")):
        apart = [max(abs(a - b), 1e-8) for a, b in zip(losses, torch_, strict=True)]
        below.semilogy(apart, color=color, linewidth=1, label=label)
    below.set_ylabel("distance\nfrom torch's loss")
    below.set_xlabel("step")
    below.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Trains, prints, and plots where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", metavar="FILE", help="write the curves as SVG or PNG")
    arguments = parser.parse_args()
    text = standard_library_text()
    print(f"{len(text)} characters of the standard library's docstrings")
    found = curves(arguments.steps, Sizes(), text)
    apart, noise = largest_differences(found)
    print(f"largest distance from torch's loss: {apart:.1e}; of torch's plain kernels {noise:.1e}")
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
