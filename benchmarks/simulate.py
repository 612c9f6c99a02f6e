# SPDX-License-Identifier: Apache-2.0
"""What binds, on paper: a step's time with extraction, from a few rates.

The model computes steps; each fills a slot of the ring, which is copied to the host
and written by threads. The simulation goes through the steps of a workload with the
same rules as the ring has: a step waits for a free slot, a slot is free after its last
write. No figure of this table has been measured; it says which rate to look at.

    python benchmarks/simulate.py
"""

import argparse
import heapq
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Machine:
    """Rates of one; bytes and tokens per second, and seconds."""

    prefill: float
    """Tokens per second without extraction."""
    step_tokens: int
    """Tokens of a step (``max_num_batched_tokens``)."""
    pack: float
    """Bytes per second into a slot, on the compute stream."""
    to_host: float
    """Bytes per second from the device; infinite where there is none to leave."""
    write: float
    """Bytes per second of all writers together."""
    per_file: float
    """Seconds of a writer's thread to make and complete a file."""
    threads: int = 8
    slots: int = 2


@dataclass(frozen=True)
class Work:
    """What is extracted."""

    bytes_per_token: float
    prompt_tokens: int


@dataclass(frozen=True)
class Outcome:
    """Of the simulated steps."""

    slowdown: float
    """Time until the last file is complete, against no extraction."""
    bytes_per_second: float
    files_per_second: float
    waited: float
    """The part of the time for which steps waited for a slot."""
    binds: str
    """What took the most of each step's time."""


def simulate(machine: Machine, work: Work, num_steps: int = 400) -> Outcome:
    """Steps one after the other, with writers beside."""
    compute = machine.step_tokens / machine.prefill
    size = machine.step_tokens * work.bytes_per_token
    files = machine.step_tokens / work.prompt_tokens
    pack, copy = size / machine.pack, size / machine.to_host
    write = size / machine.write + files * machine.per_file / machine.threads
    now = waited = copied = written = 0.0
    # When each slot is free.
    slots = [0.0] * machine.slots
    for _ in range(num_steps):
        now += compute
        free = heapq.heappop(slots)
        if free > now:
            waited += free - now
            now = free
        now += pack
        # One copy at a time, then one slot's writes after the other's.
        copied = max(now, copied) + copy
        written = max(copied, written) + write
        heapq.heappush(slots, written)
    plain = num_steps * compute
    parts = {"compute": compute + pack, "the copy to the host": copy}
    parts |= {
        "bytes written": size / machine.write,
        "files made": files * machine.per_file / machine.threads,
    }
    return Outcome(
        slowdown=written / plain,
        bytes_per_second=num_steps * size / written,
        files_per_second=num_steps * files / written,
        waited=waited / written,
        binds=max(parts, key=lambda name: parts[name]),
    )


# Round figures: a gather in a GPU's memory, 16 lanes of PCIe 4, an NVMe drive.
NODE = Machine(
    prefill=0,
    step_tokens=8192,
    pack=1e12,
    to_host=25e9,
    write=3e9,
    per_file=400e-6,
)
# Half of an H100's dense bfloat16 peak (989 TFLOPS, its data sheet), two operations for
# each parameter and token.
HALF_PEAK = 0.5 * 989e12 / 2
# DeepSeek says 73,700 tokens/s of prefill for a node of eight H800, of which 56.3 % are
# hits of a cache: "DeepSeek-V3/R1 Inference System Overview", open-infra-index, 2025.
DEEPSEEK = 73_700 * (1 - 0.563)
MODELS = {
    # Name: (tokens per second of prefill, hidden size, bytes of a value)
    "8B, one GPU": (HALF_PEAK / 8e9, 4096, 2),
    "70B, eight GPUs": (8 * HALF_PEAK / 70e9, 8192, 2),
    "DeepSeek-V3, eight GPUs": (DEEPSEEK, 7168, 2),
}
PLACES = {
    # Name: bytes per second, seconds of a thread for a file
    "memory": (6e9, 150e-6),
    "NVMe": (3e9, 400e-6),
    "network file system": (1e9, 5e-3),
}
LAYERS = 4


def table(prompt_tokens: int) -> str:
    """The page's table for prompts of one length."""
    lines = [
        "| model | stored | bytes a token | GB/s | TB in a night of 8 h | place "
        "| slowdown | files/s | binds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, (prefill, hidden_size, width) in MODELS.items():
        for stored, size in (("as computed", width), ("float8_e4m3", 1)):
            bytes_per_token = LAYERS * hidden_size * size
            for place, (write, per_file) in PLACES.items():
                machine = replace(NODE, prefill=prefill, write=write, per_file=per_file)
                result = simulate(machine, Work(bytes_per_token, prompt_tokens))
                rate = bytes_per_token * prefill
                lines.append(
                    f"| {model} | {stored} | {bytes_per_token:,} | {rate / 1e9:.2f} "
                    f"| {rate * 8 * 3600 / 1e12:,.0f} | {place} "
                    f"| {result.slowdown:.2f} | {result.files_per_second:,.0f} "
                    f"| {result.binds} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    print(table(parser.parse_args().prompt_tokens))


if __name__ == "__main__":
    main()
