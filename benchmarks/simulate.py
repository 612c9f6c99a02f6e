# SPDX-License-Identifier: Apache-2.0
"""What binds, on paper: a step's time with extraction, from a few rates.

The model computes steps; each fills a slot of the ring, which is copied to the host
and written by threads. The simulation goes through the steps of a workload with the
same rules as the ring has: a step waits for a free slot, a slot is free after its last
write. The tables of ``docs/features/hidden_states_sizing.md`` are its output.

    python benchmarks/simulate.py
    python benchmarks/simulate.py --parts build/bench-parts.json \\
        --measured build/bench.json

The second form takes the rates of the machine on which both files were measured, and
sets the simulation beside what was measured there.
"""

import argparse
import heapq
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Machine:
    """What one engine has of a machine; bytes and tokens per second, and seconds."""

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
    shared_cores: int = 0
    """Processors on which the writers take turns with the model; 0 where it runs on a
    device."""


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
    in_parallel = machine.shared_cores or machine.threads
    make = files * machine.per_file / in_parallel
    write = size / machine.write + make
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
        if machine.shared_cores:  # nothing is beside: all of it takes their time
            now += write
            written = now
        else:
            # One copy at a time, then one slot's writes after the other's.
            copied = max(now, copied) + copy
            written = max(copied, written) + write
        heapq.heappush(slots, written)
    parts = {"compute": compute + pack, "copy to the host": copy}
    parts |= {"bytes": size / machine.write, "files": make}
    return Outcome(
        slowdown=written / (num_steps * compute),
        waited=waited / written,
        binds=max(parts, key=lambda name: parts[name]),
    )


@dataclass(frozen=True)
class Model:
    """One engine of a node of eight H100."""

    prefill: float
    """Published, in tokens per second."""
    hidden_size: int
    engines: int
    """How many of them a node has, which share its disks."""


MODELS = {
    # TensorRT-LLM 1.0's performance overview: FP8 on one H100, 2,048 tokens in and 128
    # out, 3,450 tokens out per second.
    "8B": Model(3_450 / 128 * 2048, 4096, 8),
    # The same, on two H100: 762 tokens out per second.
    "70B": Model(762 / 128 * 2048, 8192, 4),
    # LMSYS, "Deploying DeepSeek with PD Disaggregation and Large-Scale Expert
    # Parallelism on 96 H100 GPUs", 2025: prompts of 2,000 tokens, of each node.
    "DeepSeek-V3": Model(52_300, 7168, 1),
}
# Round figures of one GPU: a gather in its memory, which is read and written at
# 3.35 TB/s together (data sheet), and 16 lanes of PCIe 5, of 64 GB/s.
GPU = Machine(
    prefill=math.inf,
    step_tokens=8192,
    pack=1.2e12,
    to_host=50e9,
    write=math.inf,
    per_file=0,
)


@dataclass(frozen=True)
class Place:
    """Where a node's files go."""

    write: float
    """Bytes per second, of the whole node."""
    per_file: float
    """Seconds of a thread for a file and its lock."""
    files: float
    """Files per second that it can make for the whole node."""


PLACES = {
    # A core copies some 10 GB/s; a file takes two creations, a rename, some 30 calls.
    "memory": Place(80e9, 150e-6, 100_000),
    "one NVMe drive": Place(6e9, 300e-6, 30_000),
    "four NVMe drives": Place(24e9, 300e-6, 100_000),
    # Two creations of a millisecond or two: Lustre's mdtest by Dell, 500 to 1,100 a
    # second of one thread, 15,000 to 27,000 of 240. Two links of 100 Gbit/s.
    "network file system": Place(20e9, 4e-3, 8_000),
}
LAYERS = 4


def budget() -> str:
    """How many bytes there are."""
    lines = [
        "| model | tokens/s of a node | stored | KiB per token | GB/s of an engine "
        "| GB/s of a node | TB in 8 h | MiB of a slot |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, model in MODELS.items():
        for stored, width in (("bfloat16", 2), ("float8_e4m3", 1)):
            size = LAYERS * model.hidden_size * width
            engine = size * model.prefill / 1e9
            node = engine * model.engines
            lines.append(
                f"| {name} | {model.prefill * model.engines:,.0f} | {stored} "
                f"| {size / 1024:.0f} | {engine:.2f} | {node:.1f} "
                f"| {node * 8 * 3.6:,.0f} | {size * GPU.step_tokens / 2**20:,.0f} |"
            )
    return "\n".join(lines) + "\n"


def slowdowns(width: int = 2) -> str:
    """What it costs where, for short and long prompts."""
    lengths = (16, 256, 2048)
    lines = [
        "| model | place | " + " | ".join(f"prompts of {n:,}" for n in lengths) + " |",
        "| --- | --- |" + " --- |" * len(lengths),
    ]
    for name, model in MODELS.items():
        for title, place in PLACES.items():
            cells = []
            for length in lengths:
                files = place.files / model.engines
                machine = replace(
                    GPU,
                    prefill=model.prefill,
                    write=place.write / model.engines,
                    # No sooner than the place makes them for all.
                    per_file=max(place.per_file, GPU.threads / files),
                )
                work = Work(LAYERS * model.hidden_size * width, length)
                outcome = simulate(machine, work)
                binds = "" if outcome.slowdown < 1.02 else f", {outcome.binds}"
                cells.append(f"{outcome.slowdown:.2f}{binds}")
            lines.append(f"| {name} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def beside_measured(parts: dict[str, Any], measured: dict[str, Any]) -> str:
    """The simulation with this machine's rates, and what was measured here."""
    writes = [each for each in parts["writes"] if each["folder"] == "/dev/shm"]
    by_files = {each["files"]: each["writer"] * 1e9 for each in writes}
    large = by_files["32 files, 8 steps of 256 rows"]
    small_size = 16 * LAYERS * 1024 * 4
    small = small_size / by_files["512 files, 1 step of 16 rows"]
    cores = int(parts["num_cpus"])
    packs = [
        each["pack"] * 1e9
        for each in parts["pack"]
        if each["dtypes"] == "float32 to float32" and each["rows"] == "prefill, one run"
    ]
    here = Machine(
        prefill=math.inf,
        step_tokens=2048,
        pack=sorted(packs)[len(packs) // 2],
        to_host=math.inf,
        write=large,
        per_file=max(0.0, small - small_size / large) * cores,
        shared_cores=cores,
    )
    lines = [
        "| model | workload | slowdown, simulated | measured | lowest to highest |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in measured["results"]:
        figures = result["figures"]
        ours, plain = figures.get("ours"), figures.get("plain")
        if not ours or not plain or not ours["files"] or ours["tokens"] == 0:
            continue
        tokens = plain["tokens"] / plain["seconds"]
        machine = replace(here, prefill=tokens)
        work = Work(
            ours["bytes"] / ours["tokens"],
            max(1, round(ours["tokens"] / ours["files"])),
        )
        simulated = simulate(machine, work).slowdown
        lines.append(
            f"| {result['model']}, {result['mode']} | {result['workload']} "
            f"| {simulated:.3f} | {ours['slowdown']:.3f} "
            f"| {ours['lowest']:.3f} to {ours['highest']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=Path, help="of micro.py, in JSON")
    parser.add_argument("--measured", type=Path, help="of hidden_states.py, in JSON")
    arguments = parser.parse_args()
    if (arguments.parts is None) != (arguments.measured is None):
        parser.error("--parts and --measured belong together")
    if arguments.parts is None:
        print(budget())
        print(slowdowns())
        return
    parts = json.loads(arguments.parts.read_text())
    measured = json.loads(arguments.measured.read_text())
    print(beside_measured(parts, measured))


if __name__ == "__main__":
    main()
