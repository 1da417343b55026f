"""What the cards and links can do, and how much of it is assumed to be reached. Data sheets' dense figures."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.errors import UserError

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """One GPU and its links, each way.

    Attributes:
        memory: bytes that the driver offers to programs.
        flops: bf16 tensor-core FLOP/s, dense; `fp32_flops`: without tensor cores.
        hbm, nvlink, network, host: bytes/s of its memory, to GPUs of its node, to other nodes, to the host.
    """

    name: str
    memory: int
    flops: float
    fp32_flops: float
    hbm: float
    nvlink: float
    network: float
    host: float
    source: str


_H100 = "NVIDIA H100 data sheet (SXM5): 989 TFLOPS bf16, 3.35 TB/s, NVLink 900 GB/s both ways; one 400 Gb/s NIC a GPU"
_H200 = "NVIDIA H200 data sheet (SXM): 989 TFLOPS bf16, 4.8 TB/s, NVLink 900 GB/s both ways; one 400 Gb/s NIC a GPU"
_A100 = "NVIDIA A100 data sheet (SXM4): 312 TFLOPS bf16, NVLink 600 GB/s both ways; one 200 Gb/s NIC a GPU"

CARDS = {
    card.name: card
    for card in (
        Card("h100-80g", int(79.1 * GIB), 989e12, 67e12, 3.35e12, 450e9, 50e9, 55e9, _H100),
        Card("h200-141g", int(139.8 * GIB), 989e12, 67e12, 4.8e12, 450e9, 50e9, 55e9, _H200),
        Card("a100-80g", int(79.1 * GIB), 312e12, 19.5e12, 2.04e12, 300e9, 25e9, 25e9, _A100 + "; 2.04 TB/s"),
        Card("a100-40g", int(39.4 * GIB), 312e12, 19.5e12, 1.56e12, 300e9, 25e9, 25e9, _A100 + "; 1.56 TB/s"),
    )
}


def card(name: str) -> Card:
    """A card of the table.

    Raises:
        UserError: it is not in the table.
    """
    if name not in CARDS:
        raise UserError(f"--gpu {name}: not in the table of cards; known: {', '.join(CARDS)}")
    return CARDS[name]


@dataclass(frozen=True)
class Assumptions:
    """Everything that a plan takes for granted beside data sheets. Shares are between 0 and 1."""

    compute: float = 0.45  # share of peak FLOP/s that a layer's products and attention reach together
    links: float = 0.7  # share of a link's bandwidth that a collective reaches
    memory: float = 0.6  # share of the memory bandwidth that decoding and the optimizer reach
    layer_overhead: float = 150e-6  # seconds a decode step spends on launching one layer of the embedded engine
    reserved: int = 3 * GIB  # CUDA context, NCCL buffers, library workspaces
    fragmentation: float = 0.05  # share of activations and cache that the allocator wastes
    fill: float = 0.5  # mean prompt and response, as a share of their longest
