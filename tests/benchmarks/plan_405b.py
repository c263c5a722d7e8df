"""`fs.plan` of the largest Llama 3.1: `python -m tests.benchmarks.plan_405b [--layers 126] [--data 2048] [--model 8]`.

A train step with FSDP, tensor and sequence parallelism, remat and AdamW in bfloat16, by default of 405B parameters on
16,384 devices. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections import Counter

import torch

import fshard as fs
from fshard.cli.train_step import Job, train_step
from fshard.models import llama

SECONDS, GB, WITHIN = 60, 2, 0.001  # limits: CPU seconds, resident memory, difference from the formula
LENGTH = 8192


def config(layers: int = 126) -> llama.Config:
    """Llama 3.1 405B, or one of fewer blocks."""
    return llama.Config(vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=layers,
                        num_attention_heads=128, num_key_value_heads=8, max_position_embeddings=131072,
                        rope_parameters={"rope_type": "default", "rope_theta": 500000.0})  # fmt: skip


def formula(cfg: llama.Config, tokens: int, length: int) -> dict[str, int]:
    """FLOPs of a train step with remat on all ranks, of `tokens` in sequences of a length, by kind of operation.

    6 N for a token, of forward and backward; recomputed 2 N but for each block's last product, that of `down`. N: the
    weights of matrix products, all but the table of embeddings and the norms. Attention: 2 S D for each product of
    queries and keys or of scores and values, of (S + 1) / 2 positions, those up to a token's, on the average: 2 in
    forward and again in the recomputation, 5 in backward.
    """
    d, k = cfg.hidden_size, cfg.hidden_size // cfg.num_attention_heads
    attention = 2 * d * d + 2 * d * cfg.num_key_value_heads * k
    down = d * cfg.intermediate_size
    n = cfg.num_hidden_layers * (attention + 3 * down) + d * cfg.vocab_size
    recomputed = cfg.num_hidden_layers * (attention + 2 * down)
    return {"matmul": (6 * n + 2 * recomputed) * tokens,
            "attention": cfg.num_hidden_layers * 9 * (length + 1) * d * tokens}  # fmt: skip


def main() -> int:
    """Print the report; the exit status is 0 if all is within the limits."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plan_405b", description=__doc__)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--data", type=int, default=2048)
    parser.add_argument("--model", type=int, default=8)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    cfg, before = config(args.layers), _resident()
    begin, cpu = time.perf_counter(), time.process_time()
    step, state = train_step(Job(llama, cfg, LENGTH), data=args.data, model=args.model, batch=args.data, remat=True)
    plan = fs.plan(step, *state, device=fs.devices.H100)
    seconds, cpu, most = time.perf_counter() - begin, time.process_time() - cpu, _resident()
    print(plan)
    slow, large = cpu > SECONDS, most > GB
    print(f"\n{cpu:.1f} s of one CPU, limit {SECONDS}{' MISS' * slow}; {seconds:.1f} s; {len(plan.events):,} events")
    print(f"resident {most:.2f} GB, limit {GB}{' MISS' * large}; {before:.2f} of them before, torch and fshard")
    planned: Counter[str] = Counter()
    for (kind, _), flops in plan.flops.items():
        planned[kind] += flops
    wanted = formula(cfg, args.data * LENGTH, LENGTH)
    bad = planned.keys() != wanted.keys()
    for kind, total in wanted.items():
        of_rank = total / (args.data * args.model)
        error = planned[kind] / of_rank - 1
        bad |= not abs(error) <= WITHIN
        print(f"{kind:10} {planned[kind]:.6e} FLOPs of the rank, formula {of_rank:.6e}: {error:+.4%}")
    return int(slow or large or bad)


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    sys.exit(main())
