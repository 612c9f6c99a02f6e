# SPDX-License-Identifier: Apache-2.0
"""The parts of extraction by themselves: the pack, the write path, an idle step.

Each against what the machine can do at best, in turns: the pack against a copy of as
many bytes, the write path against bare `pwrite` of the same sizes to the same place.

    python benchmarks/micro.py --output figures.md
"""

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.config.hidden_states import default_writer_threads
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_file import (
    HEADER_ROOM,
    FileOptions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_sink import (
    FileSink,
    SinkRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_writer import (
    RequestWriter,
    make_pool,
)
from vllm.v1.hidden_states.capture import HiddenStateCapture
from vllm.v1.hidden_states.dtypes import FLOAT8, name_of
from vllm.v1.hidden_states.last import LastHiddenStateCapture
from vllm.v1.hidden_states.pack import (
    has_native,
    merge,
    pack_native,
    pack_reference,
    pack_rows,
)
from vllm.v1.hidden_states.plan import Span
from vllm.v1.hidden_states.ring import Ring

NUM_LAYERS = 4
CPU = torch.device("cpu")
# Larger than a processor's caches, in bytes: what is read and written comes and goes.
COLD = 256 << 20


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument(
        "--folders", nargs="+", default=["/dev/shm", tempfile.gettempdir()]
    )
    parser.add_argument("--output", type=Path, help="write the tables there, and JSON")
    return parser.parse_args()


def in_turns(sides: dict[str, Callable[[], None]], turns: int) -> dict[str, float]:
    """Median seconds of each side."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-2, turns):
        for name in list(sides) if turn % 2 else reversed(sides):
            start = time.perf_counter()
            sides[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def measure_pack(turns: int) -> list[dict[str, Any]]:
    """Gigabytes per second into the slot, of the kernel and of `memmove`."""
    results = []
    shapes = {
        "prefill, one run": [Span("a", 0, 0, 2048)],
        "half opts out, prompts of 16": [
            Span(str(i), 32 * i, 0, 16) for i in range(64)
        ],
        "decode, half opts out": [Span(str(i), 2 * i, 9, 1) for i in range(32)],
    }
    for hidden_size in (128, 1024, 4096):
        for title, spans in shapes.items():
            for dtype, out_dtype in (
                (torch.float32, torch.float32),
                (torch.bfloat16, torch.bfloat16),
                (torch.float32, FLOAT8),
            ):
                results.append(
                    {
                        "hidden_size": hidden_size,
                        "rows": title,
                        "dtypes": f"{name_of(dtype)} to {name_of(out_dtype)}",
                    }
                    | pack_speeds(hidden_size, spans, dtype, out_dtype, turns)
                )
    return results


def pack_speeds(
    hidden_size: int,
    spans: list[Span],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    turns: int,
) -> dict[str, float]:
    """Of one shape."""
    runs = merge(spans)
    num_rows = sum(count for _, count in runs)
    num_values = num_rows * NUM_LAYERS * hidden_size
    # The pack reads what it does not write, as a copy does. Different memory each time.
    step = 2048 * NUM_LAYERS * hidden_size * dtype.itemsize
    copies = max(2, min(16, COLD // step))
    batches = [
        [torch.randn(2048, hidden_size).to(dtype) for _ in range(NUM_LAYERS)]
        for _ in range(copies)
    ]
    outs = [
        torch.empty(num_rows, NUM_LAYERS, hidden_size).to(out_dtype)
        for _ in range(copies)
    ]
    scales = torch.empty(num_rows) if out_dtype == FLOAT8 else None
    flat = [torch.randn(num_values).to(dtype) for _ in range(copies)]
    copied = [torch.empty_like(each) for each in flat]
    count = {"turn": 0}

    def pack(kernel: Callable[..., None]) -> None:
        count["turn"] += 1
        index = count["turn"] % copies
        kernel(batches[index], runs, outs[index], scales)

    def copy() -> None:
        count["turn"] += 1
        index = count["turn"] % copies
        ctypes.memmove(
            copied[index].data_ptr(), flat[index].data_ptr(), flat[index].nbytes
        )

    def pack_as_users_do(
        layers: Any, runs: Any, out: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        pack_rows(layers, spans, out, scales)

    sides: dict[str, Callable[[], None]] = {
        "memmove": copy,
        "pack": partial(pack, pack_as_users_do),
        "torch": partial(pack, pack_reference),
    }
    if has_native():
        sides["native"] = partial(pack, pack_native)
    seconds = in_turns(sides, turns)
    size = num_values * dtype.itemsize
    return {name: size / each / 1e9 for name, each in seconds.items()}


def measure_writes(folder: str, turns: int) -> list[dict[str, Any]]:
    """Gigabytes per second of files that a writer makes, and of bare `pwrite`."""
    results = []
    root = Path(tempfile.mkdtemp(prefix="bench-writes-", dir=folder))
    try:
        for title, num_files, num_steps, rows in (
            ("32 files, 8 steps of 256 rows", 32, 8, 256),
            ("128 files, 1 step of 256 rows", 128, 1, 256),
            ("512 files, 1 step of 16 rows", 512, 1, 16),
        ):
            results.append(
                {"folder": folder, "files": title}
                | write_speeds(root, num_files, num_steps, rows, turns)
            )
    finally:
        shutil.rmtree(root)
    return results


def write_speeds(
    root: Path, num_files: int, num_steps: int, num_rows: int, turns: int
) -> dict[str, float]:
    """Of one shape, with a hidden size of 1,024 in float32."""
    hidden_size = 1024
    row_bytes = NUM_LAYERS * hidden_size * 4
    ring = Ring(2, (num_rows, NUM_LAYERS, hidden_size), torch.float32, CPU)
    slots = [ring.acquire(), ring.acquire()]
    token_ids = np.arange(num_steps * num_rows)
    pool = make_pool(default_writer_threads(), spread=False)
    count = {"turn": 0}

    def paths() -> list[str]:
        for path in root.iterdir():
            path.unlink()
        count["turn"] += 1
        return [
            str(root / f"{count['turn']}-{i}.safetensors") for i in range(num_files)
        ]

    def ours() -> None:
        writers = []
        for path in paths():
            request = SinkRequest(
                os.path.basename(path),
                path,
                token_ids,
                len(token_ids),
                tuple(range(NUM_LAYERS)),
                hidden_size,
                torch.float32,
            )
            writer = RequestWriter(
                pool, request, partial(FileSink, options=FileOptions(keep_lock=False))
            )
            writer.open()
            writers.append(writer)
        for step in range(num_steps):
            slot = slots[step % 2]
            for writer in writers:
                span = Span(writer.request.request_id, 0, step * num_rows, num_rows)
                slot.retain(1)
                writer.write(span, slot, 0)
        for writer in writers:
            writer.finish(token_ids)
        for writer in writers:
            writer.drain()
        assert not any(writer.failure for writer in writers)

    def bare() -> None:
        """The same threads, and nothing but the rows."""
        files = [os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in paths()]

        def write(file: int) -> None:
            for step in range(num_steps):
                data = slots[step % 2].row_bytes(0, num_rows)
                os.pwrite(file, data, HEADER_ROOM + step * num_rows * row_bytes)
            os.close(file)

        list(pool.map(write, files))

    seconds = in_turns({"pwrite": bare, "writer": ours}, turns)
    pool.shutdown()
    size = num_files * num_steps * num_rows * row_bytes
    return {name: size / each / 1e9 for name, each in seconds.items()}


def measure_idle(turns: int) -> dict[str, float]:
    """Microseconds of a step of 64 requests that has nothing to take."""
    hidden_states = torch.zeros(64, 128)
    layers = [torch.zeros(64, 128) for _ in range(NUM_LAYERS)]
    request_ids = [f"request-{i}" for i in range(64)]
    batch: Any = request_ids, [1] * 64, np.full(64, 100)
    idle: Any = SimpleNamespace(wanted={})
    model = SimpleNamespace(set_aux_hidden_state_layers=lambda layers: None)
    extraction = HiddenStateCapture(
        range(NUM_LAYERS),
        128,
        torch.float32,
        64,
        2,
        CPU,
        True,
        lambda: idle,
    )
    extraction.attach(model)
    last = LastHiddenStateCapture(
        is_wanted=lambda request: False,
        hidden_size=128,
        layer=6,
        max_requests=64,
        device=CPU,
        dtype=torch.float32,
        is_writer=True,
    )

    def step_last() -> None:
        last.begin_step(set(), [])
        last.capture(hidden_states, *batch)
        last.take()

    sides: dict[str, Callable[[], Any]] = {
        "extraction": lambda: extraction.capture((hidden_states, layers), *batch),
        "last hidden state": step_last,
    }

    def often(step: Callable[[], Any]) -> None:
        for _ in range(1000):
            step()

    seconds = in_turns(
        {name: partial(often, step) for name, step in sides.items()}, turns
    )
    return {name: each * 1e3 for name, each in seconds.items()}


def tables(results: dict[str, Any]) -> str:
    """The figures, in Markdown."""
    lines = [
        "| rows of four layers | hidden size | dtypes | memmove, GB/s | pack "
        "| pack / memmove | torch | native | native / torch |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in results["pack"]:
        native = each.get("native", float("nan"))
        lines.append(
            f"| {each['rows']} | {each['hidden_size']:,} | {each['dtypes']} "
            f"| {each['memmove']:.2f} | {each['pack']:.2f} "
            f"| {each['pack'] / each['memmove']:.2f} | {each['torch']:.2f} "
            f"| {native:.2f} | {native / each['torch']:.2f} |"
        )
    lines += [
        "",
        "| files | where | pwrite, GB/s | writer | writer / pwrite |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in results["writes"]:
        lines.append(
            f"| {each['files']} | `{each['folder']}` | {each['pwrite']:.2f} "
            f"| {each['writer']:.2f} | {each['writer'] / each['pwrite']:.2f} |"
        )
    lines += ["", "| a step of 64 requests with nothing to take | microseconds |"]
    lines += ["| --- | --- |"]
    lines += [f"| {name} | {each:.1f} |" for name, each in results["idle"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parse_arguments()
    results: dict[str, Any] = {"pack": measure_pack(arguments.turns), "writes": []}
    for folder in arguments.folders:
        results["writes"] += measure_writes(folder, max(5, arguments.turns // 3))
    results["idle"] = measure_idle(arguments.turns)
    machine = (
        f"{len(os.sched_getaffinity(0))} CPUs, {platform.machine()}, "
        f"{torch.get_num_threads()} threads of torch, Python {sys.version.split()[0]}"
    )
    text = f"{tables(results)}\n{machine}; {arguments.turns} turns.\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
        cpus = {"num_cpus": len(os.sched_getaffinity(0))}
        everything = {"machine": machine} | cpus | results
        arguments.output.with_suffix(".json").write_text(
            json.dumps(everything, indent=1)
        )


if __name__ == "__main__":
    main()
